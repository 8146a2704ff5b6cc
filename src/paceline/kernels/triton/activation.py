"""The gate of the feed-forward layer, to the model's dtype or to FP8 with one scale a token.

The reference is `paceline.kernels.activation`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paceline.kernels.triton.fp8 import fp8_scale, to_fp8_range

_ROW_BLOCK = 16384
"""Columns a program of the FP8 version keeps in registers; wider rows are computed twice."""


@triton.jit
def _product(row, column, width):
    """``silu(gate) * up`` at ``column``, float32; 0 outside."""
    inside = column < width
    gate = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(row + width + column, mask=inside, other=0.0).to(tl.float32)
    return gate * tl.sigmoid(gate) * up


@triton.jit
def _silu_mul_kernel(gate_up, out, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    y = _product(gate_up + token * 2 * width, column, width)
    tl.store(out + token * width + column, y.to(out.dtype.element_ty), mask=column < width)


@triton.jit
def _silu_mul_fp8_kernel(gate_up, out, out_scale, width, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = gate_up + token * 2 * width
    largest = tl.zeros((BLOCK,), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        largest = tl.maximum(largest, tl.abs(_product(row, chunk * BLOCK + column, width)))
    scale = fp8_scale(tl.max(largest, 0))
    # With one chunk, and no store before it, the compiler finds that the product is already there.
    for chunk in tl.static_range(CHUNKS):
        here = chunk * BLOCK + column
        y = to_fp8_range(_product(row, here, width), scale)
        tl.store(out + token * width + here, y.to(out.dtype.element_ty), mask=here < width)
    tl.store(out_scale + token, scale)


def silu_mul(gate_up: Tensor, *, out: Tensor | None = None, pdl: bool = False) -> Tensor:
    """``silu(gate) * up`` of ``gate_up`` ``[T, 2n]``, gate first; ``[T, n]`` in the same dtype.

    Args:
        gate_up: contiguous.
        out: where the result goes.
        pdl: start while the kernel before still runs (programmatic dependent launch).
    """
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device) if out is None else out
    assert gate_up.is_contiguous()
    assert out.is_contiguous()
    assert out.shape == (tokens, width)
    if tokens:
        block = min(2048, triton.next_power_of_2(width))
        _silu_mul_kernel[(tokens, triton.cdiv(width, block))](
            gate_up, out, width, BLOCK=block, PDL=pdl, num_warps=4, **({"launch_pdl": True} if pdl else {})
        )
    return out


def silu_mul_fp8(gate_up: Tensor, *, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """`silu_mul` to float8_e4m3fn ``[T, n]`` with one scale a token, float32 ``[T]``: largest magnitude over 448."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, width, dtype=torch.float8_e4m3fn, device=gate_up.device)
    scale = torch.empty(tokens, dtype=torch.float32, device=gate_up.device)
    assert gate_up.is_contiguous()
    if tokens:
        block = min(_ROW_BLOCK, triton.next_power_of_2(width))
        _silu_mul_fp8_kernel[(tokens,)](
            gate_up,
            out,
            scale,
            width,
            BLOCK=block,
            CHUNKS=triton.cdiv(width, block),
            PDL=pdl,
            num_warps=max(1, min(16, block // 512)),
            **({"launch_pdl": True} if pdl else {}),
        )
    return out, scale
