"""Attention of rows with many query tokens over the paged cache, whatever part of their context was computed before.

`prefill_attention` is FlashAttention-2 (arXiv 2307.08691): a program holds a tile of queries and passes over the keys
once. The query heads that share a kv head lie in one tile, token after token. `prefill_sdpa` serves one long row by
cuDNN instead. The reference is `paceline.kernels.attention`.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paceline.kernels.triton.decode_kernel import LOG2_E, LOWEST, tile_blocks, tile_slots
from paceline.kernels.triton.rotary_cache import check_cache


@triton.jit
def _attend(acc, highest, total, q, position, low, high, key_head, value_head, table, key_stride, value_stride,
            context, first, window, scale, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
            TILE_N: tl.constexpr, STAGES: tl.constexpr, MASK: tl.constexpr, WINDOW: tl.constexpr):  # fmt: skip
    """Online softmax over the tiles of keys from ``low`` to ``high``, both multiples of ``TILE_N``."""
    d = tl.arange(0, D_PAD)[None, :]
    block = tile_blocks(table, low, context, BLOCK_SIZE, TILE_N)
    for tile in tl.range(low, high, TILE_N, num_stages=STAGES):
        token = tile + tl.arange(0, TILE_N)
        keys = key_head + d + tile_slots(block, key_stride, tile, D, BLOCK_SIZE, TILE_N)
        values = value_head + d + tile_slots(block, value_stride, tile, D, BLOCK_SIZE, TILE_N)
        block = tile_blocks(table, tile + TILE_N, context, BLOCK_SIZE, TILE_N)
        if MASK:
            # What lies past the end of a row, or before its window, may be another row's: not even its NaN may be seen.
            inside = token < context
            if WINDOW:
                inside = inside & (token >= first)
            mask = inside[:, None] & (d < D)
            k = tl.load(keys, mask=mask, other=0.0).to(q.dtype)
            v = tl.load(values, mask=mask, other=0.0).to(q.dtype)
        elif D == D_PAD:
            k = tl.load(keys).to(q.dtype)
            v = tl.load(values).to(q.dtype)
        else:
            k = tl.load(keys, mask=d < D, other=0.0).to(q.dtype)
            v = tl.load(values, mask=d < D, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASK:
            seen = token[None, :] <= position[:, None]
            if WINDOW:
                seen = seen & (token[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1) * scale)
        p = tl.exp2(scores * scale - new_highest[:, None])
        shrink = tl.exp2(highest - new_highest)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(q.dtype), v, acc * shrink[:, None], input_precision="ieee")
        highest = new_highest
    return acc, highest, total


@triton.jit(
    do_not_specialize=["window", "table_stride"],
    do_not_specialize_on_alignment=["block_table", "query_start", "context_len"],
)
def _prefill_kernel(
    query,
    key_cache,
    value_cache,
    block_table,
    query_start,
    context_len,
    out,
    window,
    table_stride,
    key_stride,
    value_stride,
    softmax_scale,
    k_scale,
    v_scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOW: tl.constexpr,
    PDL: tl.constexpr,
):
    kv_head = tl.program_id(0)
    row = tl.program_id(2)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    first_token = tl.load(query_start + row)
    length = tl.load(query_start + row + 1) - first_token
    # The last tiles see most keys: they start first.
    m_tile = tl.cdiv(length * GROUP, TILE_M) - 1 - tl.program_id(1)
    if m_tile < 0:
        return
    context = tl.load(context_len + row)
    computed = context - length
    m = m_tile * TILE_M + tl.arange(0, TILE_M)
    valid = m < length * GROUP
    token = tl.minimum(m // GROUP, length - 1)
    position = computed + token
    d = tl.arange(0, D_PAD)
    head = (first_token + token).to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + m % GROUP
    offsets = head[:, None] * D + d[None, :]
    mask = valid[:, None] & (d < D)[None, :]
    q = tl.load(query + offsets, mask=mask, other=0.0)
    scale = softmax_scale * k_scale
    if key_cache.dtype.element_ty.primitive_bitwidth == 8 and q.dtype.primitive_bitwidth == 16:
        # A float8 becomes a float16 in one fast step, and a bfloat16 only by way of that in a slow one. The scale comes
        # before the cast, so that no query is beyond the range of float16.
        q = (q.to(tl.float32) * softmax_scale).to(tl.float16)
        scale = k_scale

    # Keys before `after_window` are masked by the window of some query, keys from `before_diagonal` by causality.
    earliest = computed + (m_tile * TILE_M) // GROUP
    latest = computed + tl.minimum(((m_tile + 1) * TILE_M - 1) // GROUP, length - 1)
    first = 0
    low = 0
    after_window = 0
    high = tl.cdiv(latest + 1, TILE_N) * TILE_N
    if WINDOW:
        first = tl.maximum(earliest - window + 1, 0)
        low = first // TILE_N * TILE_N
        after_window = tl.minimum(tl.cdiv(tl.maximum(latest - window + 1, 0), TILE_N) * TILE_N, high)
    before_diagonal = tl.maximum((earliest + 1) // TILE_N * TILE_N, after_window)

    key_head = key_cache + kv_head * (BLOCK_SIZE * D)
    value_head = value_cache + kv_head * (BLOCK_SIZE * D)
    table = block_table + row.to(tl.int64) * table_stride
    acc = tl.zeros((TILE_M, D_PAD), tl.float32)
    highest = tl.full((TILE_M,), LOWEST, tl.float32)
    total = tl.zeros((TILE_M,), tl.float32)
    if WINDOW:
        acc, highest, total = _attend(
            acc, highest, total, q, position, low, after_window, key_head, value_head, table, key_stride, value_stride,
            context, first, window, scale, D, D_PAD, BLOCK_SIZE, TILE_N, STAGES, True, True)  # fmt: skip
    acc, highest, total = _attend(
        acc, highest, total, q, position, after_window, before_diagonal, key_head, value_head, table, key_stride,
        value_stride, context, first, window, scale, D, D_PAD, BLOCK_SIZE, TILE_N, STAGES, False, False)  # fmt: skip
    acc, highest, total = _attend(
        acc, highest, total, q, position, before_diagonal, high, key_head, value_head, table, key_stride, value_stride,
        context, first, window, scale, D, D_PAD, BLOCK_SIZE, TILE_N, STAGES, True, WINDOW)  # fmt: skip
    tl.store(out + offsets, (acc * (v_scale / total)[:, None]).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _gather_kernel(
    key_cache,
    value_cache,
    block_table,
    keys,
    values,
    length,
    key_stride,
    value_stride,
    k_scale,
    v_scale,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    head = tl.program_id(1)
    n = tl.arange(0, BLOCK_SIZE)[:, None]
    d = tl.arange(0, D_PAD)[None, :]
    token = tl.program_id(0) * BLOCK_SIZE + n
    mask = (token < length) & (d < D)
    block = tl.load(block_table + tl.program_id(0)).to(tl.int64)
    source = (head * BLOCK_SIZE + n) * D + d
    target = (head.to(tl.int64) * length + token) * D + d
    k = tl.load(key_cache + block * key_stride + source, mask=mask, other=0.0)
    v = tl.load(value_cache + block * value_stride + source, mask=mask, other=0.0)
    if keys.dtype.element_ty != key_cache.dtype.element_ty:
        k = k.to(tl.float32) * k_scale
        v = v.to(tl.float32) * v_scale
    tl.store(keys + target, k.to(keys.dtype.element_ty), mask=mask)
    tl.store(values + target, v.to(values.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """How the kernel is cut; results differ only by rounding.

    Attributes:
        queries: rows of a tile of queries (tokens times the heads of a group), a power of 2 from 16.
        keys: tokens of a tile of keys, a power of 2 from 16.
        warps: of a program.
        stages: one more than the tiles of keys that are loaded ahead.
        registers: of a thread at most, so that two programs run at a time, one in the matrix unit while the other is
            not; None: what the compiler takes.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None

    @classmethod
    def of(cls, head_dim: int, itemsize: int) -> "PrefillTiles":
        """What fits a Hopper GPU's 227 KiB of shared memory, for queries of ``itemsize`` bytes."""
        if itemsize > 2:
            return cls(64, 32, 4, 1 if head_dim > 128 else 2)
        if head_dim > 128:
            return cls(128, 64, 8, 2)
        return cls(128, 128, 8, 2 if head_dim > 64 else 3)


def prefill_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    max_query_len: int,
    *,
    window: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    softmax_scale: float | None = None,
    tiles: PrefillTiles | None = None,
    out: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """Causal attention of the last tokens of each row, whose keys and values are in the cache already.

    Args:
        query: ``[T, q_heads, head_dim]``, rotated, row after row.
        key_cache, value_cache: ``[num_blocks, kv_heads, block_size, head_dim]``; float8_e4m3fn holds ``x / scale``.
        block_table: int32 ``[rows, max_blocks]``.
        query_start: int32 ``[rows + 1]``: row ``r`` has tokens ``query_start[r]`` to ``query_start[r + 1]``, or none.
        context_len: int32 ``[rows]``, the row's query tokens included.
        max_query_len: at least the most query tokens of a row; more costs empty programs.
        window: a token sees itself and the ``window - 1`` before it; None: all before it.
        softmax_scale: multiplies the scores; ``head_dim ** -0.5`` if None.

    Returns:
        ``[T, q_heads, head_dim]`` in the dtype of ``query``. Tokens that no row has are not written.
    """
    check_cache(key_cache, value_cache)
    _, kv_heads, block_size, head_dim = key_cache.shape
    if query.dim() != 3 or not query.is_contiguous():
        raise ValueError("query must be [T, q_heads, head_dim] and contiguous")
    if query.shape[1] % kv_heads:
        raise ValueError(f"{query.shape[1]} query heads cannot share {kv_heads} kv heads evenly")
    if out is None:
        out = torch.empty_like(query)
    rows, group = len(context_len), query.shape[1] // kv_heads
    if rows == 0 or max_query_len == 0:
        return out
    tiles = tiles or PrefillTiles.of(head_dim, query.element_size())
    options: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    _prefill_kernel[(kv_heads, triton.cdiv(max_query_len * group, tiles.queries), rows)](
        query,
        key_cache,
        value_cache,
        block_table,
        query_start,
        context_len,
        out,
        window or 0,
        block_table.stride(0),
        key_cache.stride(0),
        value_cache.stride(0),
        (head_dim**-0.5 if softmax_scale is None else softmax_scale) * LOG2_E,
        k_scale,
        v_scale,
        KV_HEADS=kv_heads,
        GROUP=group,
        D=head_dim,
        D_PAD=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        TILE_M=tiles.queries,
        TILE_N=tiles.keys,
        STAGES=tiles.stages,
        WINDOW=window is not None,
        PDL=pdl,
        num_warps=tiles.warps,
        maxnreg=tiles.registers,
        **options,
    )
    return out


def gather_kv(
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    length: int,
    dtype: torch.dtype,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Keys and values of one row's first ``length`` tokens, out of their blocks.

    Args:
        block_table: int32 ``[max_blocks]``, the row's.
        dtype: of the result; the scales apply when it is not the cache's.

    Returns:
        ``[1, kv_heads, length, head_dim]`` each.
    """
    check_cache(key_cache, value_cache)
    _, kv_heads, block_size, head_dim = key_cache.shape
    keys, values = (key_cache.new_empty(1, kv_heads, length, head_dim, dtype=dtype) for _ in range(2))
    if length:
        _gather_kernel[(triton.cdiv(length, block_size), kv_heads)](
            key_cache,
            value_cache,
            block_table,
            keys,
            values,
            length,
            key_cache.stride(0),
            value_cache.stride(0),
            k_scale,
            v_scale,
            D=head_dim,
            D_PAD=triton.next_power_of_2(head_dim),
            BLOCK_SIZE=block_size,
        )
    return keys, values


def prefill_sdpa(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_len: int,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    softmax_scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`prefill_attention` for one row without a window, by cuDNN on a contiguous copy of its keys and values.

    A cached prefix is attended to without a mask and the query's own tokens with a causal one; the two are merged by
    their logarithms of sums of exponentials. cuDNN makes a plan for each new pair of lengths, which takes long: for
    lengths that recur.

    Args:
        query: ``[n, q_heads, head_dim]``, float16 or bfloat16 on a GPU: the last ``n`` tokens of the context.
        block_table: int32 ``[max_blocks]``, the row's.
        context_len: the query's tokens included; on the host.

    Returns:
        ``[n, q_heads, head_dim]``.
    """
    tokens, q_heads, head_dim = query.shape
    prefix = context_len - tokens
    keys, values = gather_kv(
        key_cache, value_cache, block_table, context_len, query.dtype, k_scale=k_scale, v_scale=v_scale
    )
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    heads = query.transpose(0, 1).unsqueeze(0)
    attended, lse = _sdpa(heads, keys[:, :, prefix:], values[:, :, prefix:], True, scale, prefix > 0)
    if prefix and lse is not None:
        before, before_lse = _sdpa(heads, keys[:, :, :prefix], values[:, :, :prefix], False, scale, True)
        assert before_lse is not None
        share = torch.sigmoid(lse.float() - before_lse.float()).reshape(1, q_heads, tokens, 1)
        attended = torch.lerp(before.float(), attended.float(), share)
    result = attended[0].transpose(0, 1)
    return result.to(query.dtype).contiguous() if out is None else out.copy_(result)


def _sdpa(
    query: Tensor, keys: Tensor, values: Tensor, causal: bool, scale: float, with_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Attention ``[1, q_heads, n, head_dim]``, and the natural logarithm of the sums of exponentials if asked for."""
    if query.is_cuda:
        result = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, keys, values, None, with_lse, 0.0, causal, False, scale=scale
        )
        return result[0], result[1] if with_lse else None
    repeat = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(repeat, 1), values.repeat_interleave(repeat, 1)
    result = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, keys, values, 0.0, causal, scale=scale)
    return result[0], result[1]
