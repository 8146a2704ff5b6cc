"""Which attention backend serves a model on a device."""

import torch

from paceline.engine.config import InvalidConfig
from paceline.layers.attention import AttentionBackend
from paceline.layers.gather_attention import GatherAttention

BACKENDS: tuple[type[AttentionBackend], ...] = (GatherAttention,)
"""Best first."""


def attention_backend(device: torch.device, dtype: torch.dtype, head_dim: int) -> AttentionBackend:
    """A new instance of the first backend that serves. Raises InvalidConfig when none does."""
    for backend in BACKENDS:
        if backend.serves(device, dtype, head_dim):
            return backend()
    names = ", ".join(backend.name for backend in BACKENDS)
    raise InvalidConfig(f"no attention backend ({names}) serves {dtype} with heads of {head_dim} on {device}")
