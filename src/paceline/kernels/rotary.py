"""Rotary position embedding (arXiv 2104.09864), with the two halves of a head as the pairs."""

import torch
from torch import Tensor


def rotary_table(
    positions: Tensor, inverse_frequencies: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine rows for `rotate_`, once a step for all layers.

    Args:
        positions: int64 ``[T]``.
        inverse_frequencies: float32 ``[head_dim / 2]``.
        scale: multiplies both.

    Returns:
        ``[T, 1, head_dim]`` each, in ``dtype``. The first half of the sine is negated.
    """
    angles = positions[:, None].float() * inverse_frequencies
    cos, sin = angles.cos() * scale, angles.sin() * scale
    cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    return cos.to(dtype).unsqueeze(1), sin.to(dtype).unsqueeze(1)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates every head of ``x`` ``[T, heads, head_dim]`` in place; ``cos`` and ``sin`` come from `rotary_table`."""
    swapped = x.roll(x.shape[-1] // 2, -1)
    return x.mul_(cos).addcmul_(swapped, sin)
