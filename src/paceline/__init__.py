"""Serve large language models at a promised pace."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.async_llm import AsyncLLM
    from paceline.engine.sampling_params import SamplingParams
    from paceline.llm import LLM

__all__ = ["LLM", "AsyncLLM", "SamplingParams"]

_HOMES = {
    "LLM": "paceline.llm",
    "AsyncLLM": "paceline.async_llm",
    "SamplingParams": "paceline.engine.sampling_params",
}


def __getattr__(name: str) -> Any:
    """Imports what is asked for and nothing more."""
    if name == "__version__":
        return import_module("importlib.metadata").version("paceline")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, "__version__"})
