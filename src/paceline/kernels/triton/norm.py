"""Root mean square normalisation (arXiv 1910.07467), with the addition to the residual stream and FP8 in one pass.

The reference is `paceline.kernels.norm`. A row is read once and stays in registers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paceline.kernels.triton.fp8 import quantized


@triton.jit(do_not_specialize=["tokens"])
def _norm_kernel(
    delta,
    residual,
    weight,
    out,
    out_scale,
    tokens,
    width,
    residual_stride,
    eps,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    place = residual + token * residual_stride + column
    x = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    if SPLITS > 0:
        total = tl.zeros((BLOCK,), tl.float32)
        for split in tl.static_range(SPLITS):
            part = delta + (split * tokens + token) * width
            total += tl.load(part + column, mask=inside, other=0.0).to(tl.float32)
        rounded = (x + total).to(residual.dtype.element_ty)
        tl.store(place, rounded, mask=inside)
        x = rounded.to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps) * gain
    if FP8:
        y, scale = quantized(y)
        tl.store(out_scale + token, scale)
    tl.store(out + token * width + column, y.to(out.dtype.element_ty), mask=inside)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    out: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """Normalises the rows of ``x``.

    Args:
        x: ``[T, H]``, the model's dtype or float32; rows may be strided.
        weight: ``[H]``, the model's dtype.
        out: where the result goes.
        pdl: start while the kernel before still runs (programmatic dependent launch).

    Returns:
        ``[T, H]`` in the dtype of ``weight``.
    """
    out = torch.empty(x.shape, dtype=weight.dtype, device=x.device) if out is None else out
    _launch(None, x, weight, eps, out, None, pdl)
    return out


def rms_norm_fp8(x: Tensor, weight: Tensor, eps: float, *, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """`rms_norm` to float8_e4m3fn ``[T, H]`` with one scale a token, float32 ``[T]``."""
    return add_rms_norm_fp8(None, x, weight, eps, pdl=pdl)


def add_rms_norm(
    delta: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    out: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """Adds ``delta`` to the residual stream and normalises the sum, as the residual's dtype rounds it.

    Args:
        delta: ``[T, H]`` of any dtype, or partial sums ``[S, T, H]``, which are added up in order. Contiguous.
        residual: ``[T, H]``, the model's dtype or float32; overwritten with the sum. Rows may be strided.
        weight: ``[H]``, the model's dtype.
        out: where the result goes.
        pdl: as in `rms_norm`.

    Returns:
        ``[T, H]`` in the dtype of ``weight``.
    """
    out = torch.empty(residual.shape, dtype=weight.dtype, device=residual.device) if out is None else out
    _launch(delta, residual, weight, eps, out, None, pdl)
    return out


def add_rms_norm_fp8(
    delta: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` to float8_e4m3fn ``[T, H]`` with one scale a token, float32 ``[T]``.

    The scale is the row's largest magnitude over 448. Without ``delta`` the residual is only read.
    """
    out = torch.empty(residual.shape, dtype=torch.float8_e4m3fn, device=residual.device)
    scale = torch.empty(len(residual), dtype=torch.float32, device=residual.device)
    _launch(delta, residual, weight, eps, out, scale, pdl)
    return out, scale


def _launch(
    delta: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    scale: Tensor | None,
    pdl: bool,
) -> None:
    tokens, width = residual.shape
    assert residual.stride(1) == 1
    assert out.is_contiguous()
    assert out.shape == residual.shape
    assert delta is None or (delta.is_contiguous() and delta.shape[-2:] == residual.shape)
    if tokens == 0:
        return
    splits = 0 if delta is None else delta.shape[0] if delta.dim() == 3 else 1
    block = triton.next_power_of_2(width)
    _norm_kernel[(tokens,)](
        residual if delta is None else delta,
        residual,
        weight,
        out,
        residual if scale is None else scale,
        tokens,
        width,
        residual.stride(0),
        eps,
        SPLITS=splits,
        BLOCK=block,
        FP8=scale is not None,
        PDL=pdl,
        num_warps=max(1, min(16, block // 512)),
        **({"launch_pdl": True} if pdl else {}),
    )
