"""Every knob of the engine, in one place."""

from dataclasses import dataclass
from typing import Literal

DType = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How to load a model and run it. Plain data, so that it can be sent to the engine process."""

    model: str
    """Alias (``smollm2``), folder, GGUF file, or hub id (``ORG/NAME``)."""
    load_format: Literal["auto", "dummy"] = "auto"
    """``dummy``: random weights from the model's config alone."""
    device: Literal["auto", "cpu"] = "auto"
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
    kv_cache_share: float = 0.4
    """Share of the memory that is free after loading."""
    prefix_cache: bool = True
    """Reuse keys and values of prompts that start alike."""
    depth: int | None = None
    """Steps in flight. None: 1 on a CPU."""

    @property
    def max_rows(self) -> int:
        """Row ids are below this. More than ``max_num_seqs``, because a row that was given up is not reused until the
        step that says so is committed."""
        return 2 * self.max_num_seqs
