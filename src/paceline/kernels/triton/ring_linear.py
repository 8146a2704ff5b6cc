"""Linear layers of few tokens on Hopper, whose weights are on their way before the kernel in front has ended.

What `skinny_linear` computes, written in Gluon, Triton's language of explicit layouts and barriers: weights and tokens
arrive by the tensor memory accelerator in one ring of tiles. With dependent launch the ring fills with weights at once,
and with tokens when these exist. Triton's own pipeline cannot do that: it starts all loads of a loop together.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paceline.kernels.table import RingConfig
from paceline.kernels.triton.partial_sums import result_tensor
from paceline.kernels.triton.skinny_linear import MAX_ROWS

_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float8_e4m3fn: gl.float8e4nv}


@gluon.jit(do_not_specialize=["rows"])
def _ring_kernel(
    tokens,
    weights,
    x_scale,
    weight_scale,
    bias,
    out,
    rows,
    n,
    k,
    part,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    FP8: gl.constexpr,
    LATE: gl.constexpr,
    PDL: gl.constexpr,
):
    """``part``: columns of the weight a program handles, a multiple of a tile's. ``out`` [splits, rows, n]."""
    BLOCK_N: gl.constexpr = weights.block_type.shape[0]
    BLOCK_K: gl.constexpr = weights.block_type.shape[1]
    BLOCK_M: gl.constexpr = tokens.block_type.shape[0]
    BITS: gl.constexpr = weights.dtype.primitive_bitwidth
    BYTES: gl.constexpr = ((2 * BLOCK_N if GATED else BLOCK_N) + BLOCK_M) * BLOCK_K * BITS // 8
    WARPS: gl.constexpr = gl.num_warps()
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 256 // BITS])
    split = gl.program_id(1)
    low_n = gl.program_id(0) * BLOCK_N
    first = split * part
    tiles = gl.cdiv(gl.minimum(part, k - first), BLOCK_K)
    w = gl.allocate_shared_memory(weights.dtype, [STAGES, BLOCK_N, BLOCK_K], weights.layout)
    if GATED:
        up = gl.allocate_shared_memory(weights.dtype, [STAGES, BLOCK_N, BLOCK_K], weights.layout)
    x = gl.allocate_shared_memory(tokens.dtype, [STAGES, BLOCK_M, BLOCK_K], tokens.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    if PDL and not LATE:
        gdc_launch_dependents()
    for stage in gl.static_range(STAGES):
        at = first + stage * BLOCK_K
        there = stage < tiles
        mbarrier.expect(full.index(stage), BYTES, pred=there)
        tma.async_copy_global_to_shared(weights, [low_n, at], full.index(stage), w.index(stage), pred=there)
        if GATED:
            tma.async_copy_global_to_shared(weights, [low_n + n, at], full.index(stage), up.index(stage), pred=there)
    # Before the loop, so that nobody waits for them behind it.
    row_n = gl.minimum(low_n + gl.arange(0, BLOCK_N, gl.SliceLayout(1, ACC)), n - 1)
    row_m = gl.minimum(gl.arange(0, BLOCK_M, gl.SliceLayout(0, ACC)), rows - 1)
    if FP8:
        scale = gl.load(weight_scale + row_n)
        if GATED:
            scale_up = gl.load(weight_scale + n + row_n)
    if HAS_BIAS:
        offset = gl.load(bias + row_n).to(gl.float32)
        if GATED:
            offset_up = gl.load(bias + n + row_n).to(gl.float32)
    if PDL:
        gdc_wait()
    if FP8:
        token_scale = gl.load(x_scale + row_m)
    for stage in gl.static_range(STAGES):
        at = first + stage * BLOCK_K
        tma.async_copy_global_to_shared(tokens, [0, at], full.index(stage), x.index(stage), pred=stage < tiles)
    acc = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, ACC)
    acc_up = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, ACC)
    stage = 0
    phase = 0
    for tile in range(tiles):
        ready = full.index(stage)
        mbarrier.wait(ready, phase)
        operand = x.index(stage).permute((1, 0))
        acc = warpgroup_mma(w.index(stage), operand, acc, is_async=True)
        if GATED:
            acc_up = warpgroup_mma(up.index(stage), operand, acc_up, is_async=True)
            acc, acc_up = warpgroup_mma_wait(0, deps=[acc, acc_up])
        else:
            acc = warpgroup_mma_wait(0, deps=[acc])
        at = first + (tile + STAGES) * BLOCK_K
        there = tile + STAGES < tiles
        mbarrier.expect(ready, BYTES, pred=there)
        tma.async_copy_global_to_shared(weights, [low_n, at], ready, w.index(stage), pred=there)
        if GATED:
            tma.async_copy_global_to_shared(weights, [low_n + n, at], ready, up.index(stage), pred=there)
        tma.async_copy_global_to_shared(tokens, [0, at], ready, x.index(stage), pred=there)
        around = stage == STAGES - 1
        stage = gl.where(around, 0, stage + 1)
        phase = gl.where(around, phase ^ 1, phase)
    if PDL and LATE:
        gdc_launch_dependents()
    if FP8:
        acc *= scale[:, None] * token_scale[None, :]
        if GATED:
            acc_up *= scale_up[:, None] * token_scale[None, :]
    if HAS_BIAS:
        acc += gl.where(split == 0, offset, 0.0)[:, None]
        if GATED:
            acc_up += offset_up[:, None]
    if GATED:
        acc = acc / (1.0 + gl.exp(-acc)) * acc_up
    STORE: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, WARPS], [0, 1])
    y = gl.convert_layout(acc.to(out.dtype.element_ty), STORE)
    column = low_n + gl.arange(0, BLOCK_N, gl.SliceLayout(1, STORE))[:, None]
    row = gl.arange(0, BLOCK_M, gl.SliceLayout(0, STORE))[None, :]
    gl.store(out + (split * rows + row).to(gl.int64) * n + column, y, mask=(row < rows) & (column < n))


def ring_linear(
    x: Tensor,
    weight: Tensor,
    *,
    config: RingConfig,
    bias: Tensor | None = None,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    gated: bool = False,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """``x @ weight.T + bias`` for at most `MAX_ROWS` tokens; gated: ``silu`` of the first half times the second.

    Args:
        x: ``[M, K]``, bfloat16 or float16, or float8_e4m3fn if ``x_scale`` is given; rows may be strided. A row's
            bytes, and their stride, are a multiple of 16.
        weight: ``[N, K]``, contiguous, in the dtype of ``x``. Gated: ``[2N, K]``, gate first.
        config: tiles.
        bias: one element for each row of the weight.
        x_scale: float32 ``[M]``, given together with ``weight_scale``.
        weight_scale: float32, one element for each row of the weight.
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
    splits = config.splits
    if rows > MAX_ROWS:
        raise ValueError(f"ring_linear takes at most {MAX_ROWS} rows, not {rows}")
    if gated and splits > 1:
        raise ValueError("a gated layer cannot split K: the gate needs whole sums")
    assert weight.is_contiguous()
    assert weight.shape[1] == k
    assert weight.dtype == x.dtype
    assert (x_scale is None) == (weight_scale is None) == (x.dtype != torch.float8_e4m3fn)
    out = result_tensor(x, n, splits, dtype or (x.dtype if x_scale is None else torch.bfloat16), out)
    if rows == 0:
        return out
    _ring_kernel[(triton.cdiv(n, config.block_n), splits)](
        _tiles(x, max(16, triton.next_power_of_2(rows)), config.block_k),
        _tiles(weight, config.block_n, config.block_k),
        x if x_scale is None else x_scale,
        weight if weight_scale is None else weight_scale,
        weight if bias is None else bias,
        out,
        rows,
        n,
        k,
        triton.cdiv(triton.cdiv(k, config.block_k), splits) * config.block_k,
        STAGES=config.stages,
        GATED=gated,
        HAS_BIAS=bias is not None,
        FP8=x_scale is not None,
        LATE=config.late,
        PDL=pdl,
        num_warps=config.warps,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


def _tiles(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A matrix as the tensor memory accelerator reads it, in tiles; beyond its edges are zeros."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], _DTYPES[matrix.dtype])
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns], layout)
