"""FP8 (float8_e4m3fn) with scales, as plain torch: a value is its FP8 number times the scale of its row."""

import torch
from torch import Tensor

FP8_MAX = 448.0
"""Largest finite float8_e4m3fn."""


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Dynamic quantisation, one scale a row: tokens of activations, output channels of a weight.

    Args:
        x: ``[R, K]``, finite.

    Returns:
        float8_e4m3fn ``[R, K]``, and float32 ``[R]``: the row's largest magnitude over 448 (1 for a row of zeros).
    """
    wide = x.float()
    largest = wide.abs().amax(-1)
    scale = torch.where(largest > 0, largest / FP8_MAX, 1.0)
    return (wide / scale[:, None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def fp8_linear_reference(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``x @ weight.T`` of FP8 matrices, in float32, rounded once at the end.

    Args:
        x: float8_e4m3fn ``[T, K]``, with ``x_scale`` float32 ``[T]``.
        weight: float8_e4m3fn ``[N, K]``, with ``weight_scale`` float32 ``[N]``.
        bias: ``[N]``.

    Returns:
        ``[T, N]`` in ``dtype``.
    """
    out = (x.float() @ weight.float().T) * x_scale[:, None] * weight_scale
    return (out if bias is None else out + bias).to(dtype)
