"""FP8 (float8_e4m3fn): dynamic quantisation of activations, and matrix products of many tokens.

The reference is `paceline.kernels.fp8`, which also quantises weights.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def fp8_scale(largest):
    """The scale of a row whose largest magnitude is ``largest``, float32."""
    return tl.where(largest > 0.0, largest / 448.0, 1.0)


@triton.jit
def to_fp8_range(x, scale):
    """``x / scale``, kept in the range of float8_e4m3fn."""
    return tl.clamp(x / scale, -448.0, 448.0, tl.PropagateNan.ALL)


@triton.jit
def quantized(x):
    """A row of float32 in the range of float8_e4m3fn, not yet rounded, and its scale."""
    scale = fp8_scale(tl.max(tl.abs(x), 0))
    return to_fp8_range(x, scale), scale


@triton.jit
def _quantize_kernel(x, out, out_scale, width, x_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    y, scale = quantized(tl.load(x + token * x_stride + column, mask=inside, other=0.0).to(tl.float32))
    tl.store(out_scale + token, scale)
    tl.store(out + token * width + column, y.to(out.dtype.element_ty), mask=inside)


def quantize_tokens(x: Tensor, *, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """Dynamic quantisation, one scale a token.

    Args:
        x: ``[T, K]``; rows may be strided.
        pdl: start while the kernel before still runs (programmatic dependent launch).

    Returns:
        float8_e4m3fn ``[T, K]``, and float32 ``[T]``: the row's largest magnitude over 448 (1 for a row of zeros).
    """
    tokens, width = x.shape
    assert x.stride(1) == 1
    out = torch.empty(tokens, width, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(tokens, dtype=torch.float32, device=x.device)
    if tokens:
        block = triton.next_power_of_2(width)
        _quantize_kernel[(tokens,)](
            x,
            out,
            scale,
            width,
            x.stride(0),
            BLOCK=block,
            PDL=pdl,
            num_warps=max(1, min(16, block // 512)),
            **({"launch_pdl": True} if pdl else {}),
        )
    return out, scale


def fp8_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    fast_accumulation: bool = True,
) -> Tensor:
    """``x @ weight.T`` for many tokens, by `torch._scaled_mm` with one scale a row on both sides.

    Args:
        x: float8_e4m3fn ``[T, K]``, contiguous, with ``x_scale`` float32 ``[T]``.
        weight: float8_e4m3fn ``[N, K]``, contiguous, with ``weight_scale`` float32 ``[N]``. N and K are multiples
            of 16.
        bias: ``[N]``.
        dtype: of the result; torch's row-wise product on CUDA knows bfloat16.
        fast_accumulation: sum inside the tensor cores, which keep about 14 bits; else promote partial sums to float32
            every few steps, which is slower.

    Returns:
        ``[T, N]`` in ``dtype``.

    Raises:
        ValueError: N or K is not a multiple of 16.
    """
    if weight.shape[0] % 16 or weight.shape[1] % 16:
        raise ValueError(f"an FP8 weight needs multiples of 16, not {tuple(weight.shape)}")
    if len(x) == 0:
        return torch.empty(0, len(weight), dtype=dtype, device=x.device)
    out = torch._scaled_mm(
        x,
        weight.t(),
        scale_a=x_scale[:, None],
        scale_b=weight_scale[None, :],
        out_dtype=dtype,
        use_fast_accum=fast_accumulation,
    )
    return out if bias is None else out.add_(bias)
