"""Which attention backend serves a model on a device."""

import torch

from paceline.engine.config import InvalidConfig
from paceline.layers.attention import AttentionBackend, AttentionSpec
from paceline.layers.gather_attention import GatherAttention


def attention_backend(
    spec: AttentionSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype
) -> AttentionBackend:
    """A new instance of the first backend that serves. Raises InvalidConfig when none does."""
    backends: list[type[AttentionBackend]] = [GatherAttention]
    if device.type == "cuda":
        from paceline.layers.paged_attention import PagedAttention

        backends.insert(0, PagedAttention)
    for backend in backends:
        if backend.serves(device, dtype, kv_dtype, spec.head_dim):
            return backend(spec, dtype)
    names = ", ".join(backend.name for backend in backends)
    raise InvalidConfig(
        f"no attention backend ({names}) serves {dtype} with a KV cache in {kv_dtype} and heads of {spec.head_dim} on "
        f"{device.type}"
    )
