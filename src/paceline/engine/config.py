"""Every knob of the engine, in one place."""

from dataclasses import dataclass, fields
from types import UnionType
from typing import Any, Literal, get_args, get_origin

LoadFormat = Literal["auto", "dummy"]
Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["auto", "fp8"]
KVCacheDType = Literal["auto", "fp8"]

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "None"}
_AT_LEAST_1 = {
    "threads": 2**31 - 1,
    "block_size": 2**31 - 1,
    "max_num_batched_tokens": 2**31 - 1,
    "max_num_seqs": 65_536,
    "max_model_len": 2**31 - 1,
    "kv_cache_bytes": 2**63 - 1,
    "depth": 1024,
}
"""The most of each whole number."""


class InvalidConfig(ValueError):
    """A knob that is out of range, or that this model or this machine cannot meet; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How to load a model and run it. Plain data, so that it can be sent to the engine process.

    Raises:
        InvalidConfig: a value is of the wrong type or out of range.
    """

    model: str
    """Alias (``smollm2``), folder, GGUF file, or hub id (``ORG/NAME``)."""
    load_format: LoadFormat = "auto"
    """``dummy``: random weights from the model's config alone."""
    device: Device = "auto"
    """``auto``: the GPU if there is one."""
    dtype: DType = "auto"
    """``auto``: what the checkpoint states, else float32."""
    quantization: Quantization = "auto"
    """``fp8``: weights become FP8 when they are loaded. ``auto``: as the checkpoint has them."""
    kv_cache_dtype: KVCacheDType = "auto"
    """``fp8``: keys and values in FP8, on a GPU. ``auto``: in ``dtype``."""
    threads: int | None = None
    """CPU threads for the model. None: all cores this process may use."""
    block_size: int | None = None
    """Tokens in a KV block. None: 16 on a CPU, 64 on a GPU."""
    max_num_batched_tokens: int | None = None
    """Token budget of a step. None: 2048 on a CPU, 8448 on a GPU."""
    max_num_seqs: int | None = None
    """Sequences that run at once. None: 64 on a CPU, 1024 on a GPU."""
    max_model_len: int | None = None
    """Most tokens of prompt and output together. None: what the model was made for, as far as the KV cache holds it."""
    kv_cache_bytes: int | None = None
    """Memory for keys and values. None: ``kv_cache_share`` decides."""
    kv_cache_share: float | None = None
    """Share of the memory that is free after loading; on a GPU working memory is part of it. None: 0.2 on a CPU, 0.9 on
    a GPU."""
    prefix_cache: bool = True
    """Reuse keys and values of prompts that start alike."""
    depth: int | None = None
    """Steps in flight. None: 1 on a CPU, 2 on a GPU."""

    nvtx: bool = False
    """Mark the parts of a step for NVIDIA's profilers, on a GPU."""
    step_log: str | None = None
    """File that gets a line for every step: what it had to do and how long it took."""
    simulate: str | None = None
    """Compute nothing, and take the time for it that a GPU model predicts: a JSON file, or the name of one that comes
    with paceline. Of ``model`` only the tokenizer is read."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not _fits(value, field.type):
                raise InvalidConfig(f"{field.name}: must be {_named(field.type)}, not {value!r}")
        for name, most in _AT_LEAST_1.items():
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                raise InvalidConfig(f"{name}: must be at least 1 and at most {most}, not {value}")
        if self.kv_cache_share is not None and not 0 < self.kv_cache_share <= 1:
            raise InvalidConfig(f"kv_cache_share: must be more than 0 and at most 1, not {self.kv_cache_share}")


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a field's type; a whole number is a float too, a bool is no number."""
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if isinstance(kind, UnionType):
        return any(_fits(value, choice) for choice in get_args(kind))
    if kind in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if kind is float else kind)


def _named(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if isinstance(kind, UnionType):
        return " or ".join(_WORDS[choice] for choice in get_args(kind))
    return _WORDS[kind]
