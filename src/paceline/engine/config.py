"""Every knob of the engine, in one place."""

from dataclasses import dataclass
from typing import Literal, get_args

LoadFormat = Literal["auto", "dummy"]
Device = Literal["auto", "cpu"]
DType = Literal["auto", "float32", "bfloat16", "float16"]


class InvalidConfig(ValueError):
    """A knob that is out of range, or that this model or this machine cannot meet; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How to load a model and run it. Plain data, so that it can be sent to the engine process.

    Raises:
        InvalidConfig: a value is out of range.
    """

    model: str
    """Alias (``smollm2``), folder, GGUF file, or hub id (``ORG/NAME``)."""
    load_format: LoadFormat = "auto"
    """``dummy``: random weights from the model's config alone."""
    device: Device = "auto"
    dtype: DType = "auto"
    """``auto``: what the checkpoint states, else float32."""
    threads: int | None = None
    """CPU threads for the model. None: all cores this process may use."""
    block_size: int = 16
    """Tokens in a KV block."""
    max_num_batched_tokens: int = 2048
    """Token budget of a step."""
    max_num_seqs: int = 64
    """Sequences that run at once."""
    max_model_len: int | None = None
    """Most tokens of prompt and output together. None: what the model was made for, as far as the KV cache holds it."""
    kv_cache_bytes: int | None = None
    """Memory for keys and values. None: ``kv_cache_share`` decides."""
    kv_cache_share: float = 0.2
    """Share of the memory that is free after loading."""
    prefix_cache: bool = True
    """Reuse keys and values of prompts that start alike."""
    depth: int | None = None
    """Steps in flight. None: 1 on a CPU."""

    def __post_init__(self) -> None:
        for name, choices in (("load_format", LoadFormat), ("device", Device), ("dtype", DType)):
            if (value := getattr(self, name)) not in get_args(choices):
                raise InvalidConfig(f"{name}: must be one of {', '.join(get_args(choices))}, not {value!r}")
        for name in ("block_size", "max_num_batched_tokens", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{name}: must be at least 1, not {getattr(self, name)}")
        for name in ("threads", "max_model_len", "kv_cache_bytes", "depth"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise InvalidConfig(f"{name}: must be at least 1, not {getattr(self, name)}")
        if not 0 < self.kv_cache_share <= 1:
            raise InvalidConfig(f"kv_cache_share: must be more than 0 and at most 1, not {self.kv_cache_share}")

    @property
    def max_rows(self) -> int:
        """Row ids are below this. More than ``max_num_seqs``, because a row that was given up is not reused until the
        step that says so is committed."""
        return 2 * self.max_num_seqs
