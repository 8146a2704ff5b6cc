"""Linear layers of one to four tokens.

Programs stay: each keeps its columns of the tokens in registers and walks over rows of the weight, which arrive through
a ring of asynchronous copies. With dependent launch the ring fills while the kernel before still runs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paceline.kernels.table import GemvConfig
from paceline.kernels.triton.partial_sums import result_tensor

MAX_ROWS = 4
"""More tokens are faster on the matrix unit: `skinny_linear`."""

_PROGRAMS = 264
"""Two a multiprocessor of an H100 or H200."""


@triton.jit
def _dot(w, tokens):
    """Inner products of ``w`` [BLOCK_N, BLOCK_K] with ``tokens`` [M, BLOCK_K]: [M, BLOCK_N]."""
    if tokens.shape[0] == 1:
        return tl.sum(w.to(tl.float32) * tokens, 1)[None, :]
    return tl.sum(w.to(tl.float32)[None, :, :] * tokens[:, None, :], 2)


@triton.jit(do_not_specialize=["rows"])
def _gemv_kernel(
    x,
    delta,
    sum_out,
    norm_weight,
    weight,
    weight_scale,
    bias,
    out,
    rows,
    n,
    k,
    eps,
    M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    DELTAS: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FP8: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """``out`` [splits, rows, n]; the grid is (programs, splits)."""
    program = tl.program_id(0)
    split = tl.program_id(1)
    row_m = tl.arange(0, M)
    column = split * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (column < k)[None, :]
    # Rows beyond the end read the last one again, so that loads need no mask; they are not stored.
    places = tl.minimum(row_m, rows - 1)[:, None].to(tl.int64) * k + column[None, :]
    tokens = tl.zeros((M, BLOCK_K), tl.float32)
    if PDL:
        gdc_launch_dependents()
    for group in tl.range(program, tl.cdiv(n, BLOCK_N), tl.num_programs(0), num_stages=STAGES):
        row_n = group * BLOCK_N + tl.arange(0, BLOCK_N)
        inner_n = tl.minimum(row_n, n - 1)
        weights = weight + inner_n[:, None].to(tl.int64) * k + column[None, :]
        ups = weight + (inner_n + n)[:, None].to(tl.int64) * k + column[None, :]
        w = tl.load(weights) if EVEN_K else tl.load(weights, mask=inside, other=0.0)
        if GATED:
            u = tl.load(ups) if EVEN_K else tl.load(ups, mask=inside, other=0.0)
        if group == program:  # the ring loads weights several steps ahead, so this waits with it already filling
            if PDL:
                gdc_wait()
            tokens = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
            if DELTAS > 0:
                total = tl.zeros((M, BLOCK_K), tl.float32)
                for i in tl.static_range(DELTAS):
                    total += tl.load(delta + i * rows * k + places, mask=inside, other=0.0).to(tl.float32)
                rounded = (tokens + total).to(x.dtype.element_ty)
                if program == 0:
                    tl.store(sum_out + places, rounded, mask=inside & (row_m < rows)[:, None])
                tokens = rounded.to(tl.float32)
            if NORM:
                gain = tl.load(norm_weight + column, mask=column < k, other=0.0).to(tl.float32)
                mean = tl.sum(tokens * tokens, 1) / k
                tokens = tokens * tl.rsqrt(mean + eps)[:, None] * gain[None, :]
        y = _dot(w, tokens)
        if GATED:
            z = _dot(u, tokens)
        if FP8:
            y *= tl.load(weight_scale + inner_n)[None, :]
            if GATED:
                z *= tl.load(weight_scale + n + inner_n)[None, :]
        if HAS_BIAS:
            y += tl.where(split == 0, tl.load(bias + inner_n).to(tl.float32), 0.0)[None, :]
            if GATED:
                z += tl.load(bias + n + inner_n).to(tl.float32)[None, :]
        if GATED:
            y = y * tl.sigmoid(y) * z
        results = out + (split * rows + row_m)[:, None].to(tl.int64) * n + row_n[None, :]
        tl.store(results, y.to(out.dtype.element_ty), mask=(row_m < rows)[:, None] & (row_n < n)[None, :])


def default_config(rows: int, k: int, whole: bool = False) -> GemvConfig:
    """Tiles for a shape that nobody measured.

    Args:
        rows: tokens, at most `MAX_ROWS`.
        whole: whether the sums may not be split (a gated layer, or one with the norm in front).
    """
    padded = triton.next_power_of_2(rows)
    block_k = triton.next_power_of_2(k)
    if not whole:
        block_k = min(block_k, 4096 // padded)
    block_n = max(1, min(8, 16384 // (padded * block_k)))
    programs = max(1, _PROGRAMS // triton.cdiv(k, block_k))
    return GemvConfig(block_n, block_k, programs, stages=4, warps=8 if padded * block_k > 2048 else 4)


def gemv(
    x: Tensor,
    weight: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    delta: Tensor | None = None,
    sum_out: Tensor | None = None,
    bias: Tensor | None = None,
    weight_scale: Tensor | None = None,
    gated: bool = False,
    config: GemvConfig | None = None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """``x @ weight.T + bias`` for at most `MAX_ROWS` tokens; gated: ``silu`` of the first half times the second.

    Args:
        x: ``[M, K]``, contiguous; float32 or the model's dtype. With ``norm_weight`` the residual stream.
        weight: ``[N, K]``, contiguous, in the model's dtype, or float8_e4m3fn if ``weight_scale`` is given.
            Gated: ``[2N, K]``, gate first.
        norm_weight: ``[K]``: normalise the rows of ``x`` first (`paceline.kernels.norm`), with ``eps``.
        delta: added to ``x`` first: ``[M, K]`` of any dtype, or partial sums ``[S, M, K]``.
        sum_out: where ``x + delta`` goes, like ``x``, and not ``x`` itself: other programs still read that.
        bias: one element for each row of the weight.
        weight_scale: float32, one element for each row of the weight.
        config: tiles; None: `default_config`.
        dtype: of the result; None: that of ``norm_weight`` if given, else that of ``x``.
        out: where the result goes.
        pdl: start while the kernel before still runs (programmatic dependent launch).

    Returns:
        ``[M, N]`` in ``dtype`` if one program sees all of K, else partial sums, float32 ``[splits, M, N]``.

    Raises:
        ValueError: too many rows, or a gated or normalised layer whose config splits K.
    """
    rows, k = x.shape
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    whole = gated or norm_weight is not None
    config = config or default_config(rows, k, whole)
    splits = triton.cdiv(k, config.block_k)
    if rows > MAX_ROWS:
        raise ValueError(f"gemv takes at most {MAX_ROWS} rows, not {rows}")
    if whole and splits > 1:
        raise ValueError("a gated or normalised layer cannot split K: it needs whole sums")
    assert weight.is_contiguous()
    assert weight.shape[1] == k
    assert x.is_contiguous()
    assert (delta is None) == (sum_out is None)
    out = result_tensor(x, n, splits, dtype or (x if norm_weight is None else norm_weight).dtype, out)
    if rows == 0:
        return out
    deltas = 0
    if delta is not None and sum_out is not None:
        assert delta.is_contiguous()
        assert delta.shape[-2:] == x.shape
        assert sum_out.is_contiguous()
        assert sum_out.shape == x.shape
        assert sum_out.dtype == x.dtype
        assert sum_out.data_ptr() != x.data_ptr()
        deltas = delta.shape[0] if delta.dim() == 3 else 1
    _gemv_kernel[(min(config.programs, triton.cdiv(n, config.block_n)), splits)](
        x,
        x if delta is None else delta,
        x if sum_out is None else sum_out,
        weight if norm_weight is None else norm_weight,
        weight,
        weight if weight_scale is None else weight_scale,
        weight if bias is None else bias,
        out,
        rows,
        n,
        k,
        eps,
        M=triton.next_power_of_2(rows),
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        STAGES=config.stages,
        NORM=norm_weight is not None,
        DELTAS=deltas,
        GATED=gated,
        HAS_BIAS=bias is not None,
        FP8=weight_scale is not None,
        EVEN_K=k % config.block_k == 0,
        PDL=pdl,
        num_warps=config.warps,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out
