"""Linear layers of few tokens, at the speed at which memory delivers the weight.

The weight stands on the side of the matrix unit that has 64 rows, the tokens on the side that may have 16: nothing is
computed for absent tokens but the padding to 16, 32 or 64. A program streams some rows of the weight, or a part of
their columns ("split K"); parts are written side by side and added up, in order, by whatever kernel reads them next.
So results do not depend on timing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paceline.kernels.table import SkinnyConfig
from paceline.kernels.triton.partial_sums import result_tensor

MAX_ROWS = 64
"""More tokens are faster by cuBLAS."""

_PROGRAMS = 256
"""Enough programs to fill a large GPU, about two a multiprocessor."""


@triton.jit(do_not_specialize=["rows"])
def _skinny_kernel(
    x,
    x_scale,
    weight,
    weight_scale,
    bias,
    out,
    rows,
    n,
    k,
    x_stride,
    part,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FP8_WEIGHT: tl.constexpr,
    FP8_X: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """``part``: columns of the weight a program handles, a multiple of BLOCK_K. ``out`` [splits, rows, n]."""
    split = tl.program_id(1)
    row_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_m = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_K)
    first = split * part
    last = tl.minimum(first + part, k)
    # Rows beyond the end read the last one again, so that loads need no mask; they are not stored.
    inner_n = tl.minimum(row_n, n - 1)
    weights = weight + inner_n[:, None].to(tl.int64) * k + column[None, :]
    ups = weight + (inner_n + n)[:, None].to(tl.int64) * k + column[None, :]
    tokens = x + tl.minimum(row_m, rows - 1)[None, :] * x_stride + column[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    acc_up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if PDL:
        gdc_launch_dependents()
    # Before the loop, so that nobody waits for them behind it.
    if FP8_WEIGHT:
        scale = tl.load(weight_scale + inner_n)[:, None]
        if GATED:
            scale_up = tl.load(weight_scale + n + inner_n)[:, None]
    if PDL:
        gdc_wait()
    if FP8_X:
        token_scale = tl.load(x_scale + tl.minimum(row_m, rows - 1))[None, :]
    for at in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        inside = at + column < k
        w = tl.load(weights + at) if EVEN_K else tl.load(weights + at, mask=inside[None, :], other=0.0)
        if GATED:
            u = tl.load(ups + at) if EVEN_K else tl.load(ups + at, mask=inside[None, :], other=0.0)
        a = tl.load(tokens + at) if EVEN_K else tl.load(tokens + at, mask=inside[:, None], other=0.0)
        if FP8_WEIGHT and not FP8_X:
            w = w.to(a.dtype)
        acc = tl.dot(w, a, acc, input_precision="ieee")
        if GATED:
            if FP8_WEIGHT and not FP8_X:
                u = u.to(a.dtype)
            acc_up = tl.dot(u, a, acc_up, input_precision="ieee")
    if FP8_WEIGHT:
        acc *= scale
        if GATED:
            acc_up *= scale_up
    if FP8_X:
        acc *= token_scale
        acc_up *= token_scale
    if HAS_BIAS:
        acc += tl.where(split == 0, tl.load(bias + inner_n).to(tl.float32), 0.0)[:, None]
        if GATED:
            acc_up += tl.load(bias + n + inner_n).to(tl.float32)[:, None]
    if GATED:
        acc = acc * tl.sigmoid(acc) * acc_up
    places = out + (split * rows + row_m)[None, :].to(tl.int64) * n + row_n[:, None]
    tl.store(places, acc.to(out.dtype.element_ty), mask=(row_m < rows)[None, :] & (row_n < n)[:, None])


def default_config(rows: int, n: int, k: int, itemsize: int, gated: bool = False) -> SkinnyConfig:
    """Tiles for a shape that nobody measured.

    Args:
        rows: tokens, at most `MAX_ROWS`.
        n: columns of the result.
        itemsize: bytes of an element of the tokens, to which the weight is widened.
    """
    block_n = 128 if gated and rows > 32 else 64
    block_k = (64 if block_n == 128 else 128) * 2 // min(itemsize, 4)
    splits = 1
    while not gated and splits < 8 and triton.cdiv(n, block_n) * splits < _PROGRAMS and k >= 8 * block_k * splits:
        splits *= 2
    return SkinnyConfig(block_n, block_k, splits, stages=4, warps=8 if block_n == 128 else 4)


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    gated: bool = False,
    config: SkinnyConfig | None = None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """``x @ weight.T + bias`` for at most `MAX_ROWS` tokens; gated: ``silu`` of the first half times the second.

    FP8 weights with FP8 tokens multiply in FP8; with tokens of another dtype they are widened in registers.

    Args:
        x: ``[M, K]``; rows may be strided. float8_e4m3fn if ``x_scale`` is given.
        weight: ``[N, K]``, contiguous, in the dtype of ``x``, or float8_e4m3fn if ``weight_scale`` is given.
            Gated: ``[2N, K]``, gate first.
        bias: one element for each row of the weight.
        x_scale: float32 ``[M]``.
        weight_scale: float32, one element for each row of the weight.
        config: tiles; None: `default_config`.
        dtype: of the result; None: that of ``x``, or bfloat16 if ``x`` is FP8.
        out: where the result goes.
        pdl: start while the kernel before still runs (programmatic dependent launch).

    Returns:
        ``[M, N]`` in ``dtype`` if the config has one split, else partial sums, float32 ``[splits, M, N]``.

    Raises:
        ValueError: too many rows, or a gated layer with more than one split.
    """
    rows, k = x.shape
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    config = config or default_config(rows, n, k, x.element_size(), gated)
    if rows > MAX_ROWS:
        raise ValueError(f"skinny_linear takes at most {MAX_ROWS} rows, not {rows}")
    if gated and config.splits > 1:
        raise ValueError("a gated layer cannot split K: the gate needs whole sums")
    assert weight.is_contiguous()
    assert weight.shape[1] == k
    assert x.stride(1) == 1
    assert x_scale is None or weight_scale is not None, "FP8 tokens need an FP8 weight"
    out = result_tensor(x, n, config.splits, dtype or (x.dtype if x_scale is None else torch.bfloat16), out)
    if rows == 0:
        return out
    part = triton.cdiv(triton.cdiv(k, config.block_k), config.splits) * config.block_k
    _skinny_kernel[(triton.cdiv(n, config.block_n), config.splits)](
        x,
        x if x_scale is None else x_scale,
        weight,
        weight if weight_scale is None else weight_scale,
        weight if bias is None else bias,
        out,
        rows,
        n,
        k,
        x.stride(0),
        part,
        BLOCK_M=max(16, triton.next_power_of_2(rows)),
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        STAGES=config.stages,
        GATED=gated,
        HAS_BIAS=bias is not None,
        FP8_WEIGHT=weight_scale is not None,
        FP8_X=x_scale is not None,
        EVEN_K=k % config.block_k == 0,
        PDL=pdl,
        num_warps=config.warps,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out
