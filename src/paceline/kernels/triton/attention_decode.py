"""Attention of one query token a row over the paged cache: reads keys and values once, at the speed of the memory.

The query heads that share a kv head are packed into one tile, so that a key is loaded once for all of them. Long rows
are split among programs (flash decoding); the last of a row's programs to finish adds the parts up, always in the same
order, so results do not depend on timing. The reference is `paceline.kernels.attention`.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paceline.kernels.triton.rotary_cache import as_stored, check_cache, sum_splits

LOG2_E = 1.4426950408889634
LOWEST = tl.constexpr(-1e30)
"""Below every score, yet finite: differences with it are never NaN."""

_MULTIPROCESSORS = 132
_PROGRAMS_PER_MULTIPROCESSOR = 4
_MIN_SPLIT = 128
"""Tokens below which one more split for the longest row costs more than it saves."""
_MIN_TOKENS = 64
"""What shorter rows are split into at least."""


@triton.jit
def tile_blocks(table, tile, end, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Block of each of ``TILE`` tokens from ``tile`` on, or one for all if they lie in one; 0 from ``end`` on.

    Loops load the blocks of the tile after the current one, so that no address waits for a load.
    """
    if BLOCK_SIZE >= TILE:
        block = tl.load(table + tile // BLOCK_SIZE, mask=tile < end, other=0)
    else:
        token = tile + tl.arange(0, TILE)
        block = tl.load(table + token // BLOCK_SIZE, mask=token < end, other=0)
    return block


@triton.jit
def tile_slots(block, stride, tile, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Where the tokens of what `tile_blocks` gave lie in a cache: int64 ``[TILE, 1]``."""
    t = tl.arange(0, TILE)
    slots = block.to(tl.int64) * stride
    if BLOCK_SIZE >= TILE:
        # One number for the tile and constants for its tokens, so that a thread has one address a tile.
        slots = (slots + tile % BLOCK_SIZE * D) + t[:, None] * D
    else:
        slots = (slots + (tile + t) % BLOCK_SIZE * D)[:, None]
    return slots


@triton.jit
def _widened(pairs, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """Lower and upper bytes of int16 ``pairs``, each a float8_e4m3fn, as two tensors of ``dtype``; exact.

    The matrix unit wants the values of two neighbouring tokens in one register. Bytes cannot be transposed on their way
    from shared memory to registers and 16-bit numbers can, so two neighbouring elements of a token travel as one number
    and part in registers: three instructions for four elements.
    """
    if NATIVE:
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 sorted;
            .reg .b16 low, high;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {low, high}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }
            """,
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        low = (pairs & 0xFF).to(tl.int8).to(tl.float8e4nv, bitcast=True)
        high = (pairs >> 8).to(tl.int8).to(tl.float8e4nv, bitcast=True)
    return low.to(dtype), high.to(dtype)


@triton.jit
def _rotated(source, partner, cos, sin, d, mask, norm, split_stride, eps, SPLITS: tl.constexpr, NORM: tl.constexpr,
             D: tl.constexpr):  # fmt: skip
    """Heads at ``source``, normalised and rotated; ``partner`` points at the other half of each pair."""
    x = sum_splits(source + d, mask, split_stride, SPLITS)
    y = sum_splits(source + partner, mask, split_stride, SPLITS)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = x * scale * tl.load(norm + d, mask=d < D, other=0.0).to(tl.float32)
        y = y * scale * tl.load(norm + partner, mask=d < D, other=0.0).to(tl.float32)
    return x * cos + y * sin


@triton.jit
def _add_up(partial, partial_lse, target, count, v_scale, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
            READ: tl.constexpr):  # fmt: skip
    """The result of ``count`` splits: ``partial [count, GROUP, D]``, weighted by ``partial_lse [count, GROUP]``.

    About ``READ`` numbers are read at a time: what takes long is the round trips.
    """
    HEADS: tl.constexpr = triton.next_power_of_2(GROUP)
    SPLITS: tl.constexpr = max(1, READ // (HEADS * D_PAD))
    split = tl.arange(0, SPLITS)[:, None]
    head = tl.arange(0, HEADS)[None, :]
    d = tl.arange(0, D_PAD)[None, None, :]
    highest = tl.full((HEADS,), LOWEST, tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    acc = tl.zeros((HEADS, D_PAD), tl.float32)
    for start in tl.range(0, count, SPLITS, num_stages=1):
        part = (start + split) * GROUP + head
        mask = (start + split < count) & (head < GROUP)
        lse = tl.load(partial_lse + part, mask=mask, other=LOWEST, cache_modifier=".cg")
        values = tl.load(
            partial + part[:, :, None] * D + d, mask=mask[:, :, None] & (d < D), other=0.0, cache_modifier=".cg"
        )
        new_highest = tl.maximum(highest, tl.max(lse, 0))
        shrink = tl.exp2(highest - new_highest)
        weight = tl.where(start + split < count, tl.exp2(lse - new_highest[None, :]), 0.0)
        total = total * shrink + tl.sum(weight, 0)
        acc = acc * shrink[:, None] + tl.sum(values * weight[:, :, None], 0)
        highest = new_highest
    acc = acc * (v_scale / total)[:, None]
    heads = tl.arange(0, HEADS)[:, None]
    columns = tl.arange(0, D_PAD)[None, :]
    tl.store(target + heads * D + columns, acc.to(target.dtype.element_ty), mask=(heads < GROUP) & (columns < D))


@triton.jit
def _begin(query, key_cache, value_cache, cos_sin, q_norm, k_norm, kv_head, context, newest, last, split_stride,
           key_stride, value_stride, softmax_scale, eps, k_scale, v_scale, TYPE: tl.constexpr,
           KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr,
           BLOCK_SIZE: tl.constexpr, SUMS: tl.constexpr, FUSED: tl.constexpr, QKV_SPLITS: tl.constexpr,
           NORM: tl.constexpr, PAIRS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """The scaled queries of a group, and the softmax (highest score, sums, result) over the newest token or nothing.

    Of queries and result even and odd columns apart if PAIRS, else twice the same. The program of the ``last`` split
    has the newest token, which it also writes. The sums ``[ROWS, SUMS]`` are still to be added up.
    """
    if PDL:
        gdc_wait()
    r = tl.arange(0, ROWS)
    # Whatever is read has this shape, if need be in every row the same, so that no layout must be converted.
    d = tl.arange(0, D_PAD)[None, :] + tl.zeros((ROWS, 1), tl.int32)
    in_head = d < D
    q_mask = (r < GROUP)[:, None] & in_head
    q_head = kv_head * GROUP + r[:, None]
    cache_type: tl.constexpr = key_cache.dtype.element_ty
    highest = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS, SUMS), tl.float32)
    acc = tl.zeros((ROWS, D_PAD), tl.float32)
    if FUSED:
        position = (context - 1).to(tl.int64)
        partner = (d + D // 2) % D
        angles = cos_sin + position * D + d % (D // 2)
        cos = tl.load(angles, mask=in_head, other=0.0)
        sin = tl.load(angles + D // 2, mask=in_head, other=0.0)
        sin = tl.where(d < D // 2, -sin, sin)
        q = _rotated(query + q_head * D, partner, cos, sin, d, q_mask, q_norm, split_stride, eps, QKV_SPLITS, NORM, D)
        # Every program, so that these loads are on their way together with those of the queries.
        source = query + (KV_HEADS * GROUP + kv_head) * D
        k = _rotated(source, partner, cos, sin, d, in_head, k_norm, split_stride, eps, QKV_SPLITS, NORM, D)
        v = sum_splits(source + KV_HEADS * D + d, in_head, split_stride, QKV_SPLITS)
        k = as_stored(k, k_scale, cache_type)
        v = as_stored(v, v_scale, cache_type)
        slot = (kv_head * BLOCK_SIZE + position % BLOCK_SIZE) * D + d
        written = in_head & (last & (r == 0))[:, None]
        tl.store(key_cache + newest * key_stride + slot, k, mask=written)
        tl.store(value_cache + newest * value_stride + slot, v, mask=written)
        score = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * (softmax_scale * k_scale)
        highest = tl.where(last, score, highest)
        total += tl.where(last & (tl.arange(0, SUMS) == 0), 1.0, 0.0)[None, :]
        acc += tl.where(last, v.to(tl.float32), 0.0)
    else:
        q = tl.load(query + q_head * D + d, mask=q_mask, other=0.0)
    if PAIRS:
        # The scale comes before the cast, so that no query is beyond the range of float16.
        q, q_odd = tl.split(tl.reshape((q.to(tl.float32) * softmax_scale).to(TYPE), (ROWS, D_PAD // 2, 2)))
        acc, acc_odd = tl.split(tl.reshape(acc, (ROWS, D_PAD // 2, 2)))
    else:
        q = q.to(TYPE)
        q_odd = q
        acc_odd = acc
    return q, q_odd, highest, total, acc, acc_odd


@triton.jit(
    do_not_specialize=["num_splits", "window", "table_stride"],
    do_not_specialize_on_alignment=["block_table", "context_len"],
)
def _decode_kernel(
    query,
    key_cache,
    value_cache,
    block_table,
    context_len,
    cos_sin,
    q_norm,
    k_norm,
    out,
    partial,
    partial_lse,
    counters,
    num_splits,
    window,
    query_stride,
    split_stride,
    table_stride,
    key_stride,
    value_stride,
    softmax_scale,
    eps,
    k_scale,
    v_scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    MIN_TILES: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    FUSED: tl.constexpr,
    QKV_SPLITS: tl.constexpr,
    NORM: tl.constexpr,
    PAIRS: tl.constexpr,
    NATIVE: tl.constexpr,
    EARLY: tl.constexpr,
    SUMS: tl.constexpr,
    PDL: tl.constexpr,
):
    kv_head = tl.program_id(0) % KV_HEADS
    split = tl.program_id(0) // KV_HEADS
    row = tl.program_id(1).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
    context = tl.maximum(tl.load(context_len + row), 1)
    first = 0
    if WINDOW:
        first = tl.maximum(context - window, 0)
    start = first // TILE * TILE
    end = context - 1 if FUSED else context  # the fused kernel has the newest token in registers
    # As many splits as the row needs; programs beyond them have nothing to do.
    tiles = tl.cdiv(tl.maximum(end - start, 1), TILE)
    tiles_per_split = tl.maximum(tl.cdiv(tiles, num_splits), MIN_TILES)
    active = tl.cdiv(tiles, tiles_per_split)
    if split >= active:
        return
    low = start + split * tiles_per_split * TILE
    high = tl.minimum(low + tiles_per_split * TILE, end)

    d = tl.arange(0, D_PAD)[None, :]
    r = tl.arange(0, ROWS)
    t = tl.arange(0, TILE)
    q_mask = (r < GROUP)[:, None] & (d < D)
    table = block_table + row * table_stride
    block = tile_blocks(table, low, high, BLOCK_SIZE, TILE)
    newest = tl.load(table + (context - 1) // BLOCK_SIZE).to(tl.int64)
    query += row * query_stride
    out_type: tl.constexpr = out.dtype.element_ty
    # A float8 is exact in float16, which it becomes in one step, and not in bfloat16.
    compute_type: tl.constexpr = tl.float16 if PAIRS and out_type == tl.bfloat16 else out_type
    ELEMENTS: tl.constexpr = 2 if PAIRS else 1  # that one number of the cache holds
    if PAIRS:
        scale = k_scale
        key_head = key_cache.to(tl.pointer_type(tl.int16))
        value_head = value_cache.to(tl.pointer_type(tl.int16))
    else:
        scale = softmax_scale * k_scale
        key_head = key_cache
        value_head = value_cache
    if EARLY:
        q = tl.zeros((ROWS, D_PAD // ELEMENTS), compute_type)
        highest = tl.zeros((ROWS,), tl.float32)
        total = tl.zeros((ROWS, SUMS), tl.float32)
        acc = tl.zeros((ROWS, D_PAD // ELEMENTS), tl.float32)
        q_odd, acc_odd = q, acc
        high = tl.maximum(high, low + 1)  # one turn of the loop at least
    else:
        q, q_odd, highest, total, acc, acc_odd = _begin(
            query, key_cache, value_cache, cos_sin, q_norm, k_norm, kv_head, context, newest, split == active - 1,
            split_stride, key_stride, value_stride, softmax_scale, eps, k_scale, v_scale, compute_type, KV_HEADS, GROUP,
            D, D_PAD, ROWS, BLOCK_SIZE, SUMS, FUSED, QKV_SPLITS, NORM, PAIRS, PDL)  # fmt: skip
    columns = tl.arange(0, D_PAD // ELEMENTS)[None, :]
    key_head += kv_head * (BLOCK_SIZE * D // ELEMENTS) + columns
    value_head += kv_head * (BLOCK_SIZE * D // ELEMENTS) + columns
    for tile in tl.range(low, high, TILE, num_stages=STAGES):
        seen = tile + t < end
        if WINDOW:
            seen = seen & (tile + t >= first)
        keys = key_head + tile_slots(block, key_stride // ELEMENTS, tile, D // ELEMENTS, BLOCK_SIZE, TILE)
        values = value_head + tile_slots(block, value_stride // ELEMENTS, tile, D // ELEMENTS, BLOCK_SIZE, TILE)
        block = tile_blocks(table, tile + TILE, high, BLOCK_SIZE, TILE)
        # What lies past the end of a row, or before its window, may be another row's: not even its NaN may be seen.
        mask = seen[:, None] & (columns < D // ELEMENTS)
        k = tl.load(keys, mask=mask, other=0)
        v = tl.load(values, mask=mask, other=0)
        if EARLY:  # noqa: SIM102, a constant and a number of the GPU are no condition together
            # The pipeline has the loads of the first tiles on their way before this.
            if tile == low:
                q, q_odd, highest, total, acc, acc_odd = _begin(
                    query, key_cache, value_cache, cos_sin, q_norm, k_norm, kv_head, context, newest,
                    split == active - 1, split_stride, key_stride, value_stride, softmax_scale, eps, k_scale, v_scale,
                    compute_type, KV_HEADS, GROUP, D, D_PAD, ROWS, BLOCK_SIZE, SUMS, FUSED, QKV_SPLITS, NORM, PAIRS,
                    PDL)  # fmt: skip
        if PAIRS:
            k, k_odd = _widened(k, compute_type, NATIVE)
            v, v_odd = _widened(v, compute_type, NATIVE)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if PAIRS:
            scores = tl.dot(q_odd, tl.trans(k_odd), scores, input_precision="ieee")
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1) * scale)
        p = tl.exp2(scores * scale - new_highest[:, None])
        shrink = tl.exp2(highest - new_highest)
        total = total * shrink[:, None] + (tl.sum(p, 1)[:, None] if SUMS == 1 else p)
        p = p.to(compute_type)
        acc = tl.dot(p, v, acc * shrink[:, None], input_precision="ieee")
        if PAIRS:
            acc_odd = tl.dot(p, v_odd, acc_odd * shrink[:, None], input_precision="ieee")
        highest = new_highest

    if PAIRS:
        acc = tl.reshape(tl.join(acc, acc_odd), (ROWS, D_PAD))
    total = tl.sum(total, 1)
    acc = acc / total[:, None]
    target = out + row * (KV_HEADS * GROUP * D) + kv_head * (GROUP * D)
    if not SPLIT:
        tl.store(target + r[:, None] * D + d, (acc * v_scale).to(out_type), mask=q_mask)
    else:
        parts = (row * KV_HEADS + kv_head) * num_splits * GROUP
        part = parts + split * GROUP + r
        tl.store(partial + part[:, None] * D + d, acc, mask=q_mask)
        tl.store(partial_lse + part, highest + tl.log2(total), mask=r < GROUP)
        counter = counters + row * KV_HEADS + kv_head
        tl.debug_barrier()  # every thread's stores come before the count
        arrived = tl.atomic_add(counter, 1, sem="acq_rel")
        if arrived == active - 1:
            tl.debug_barrier()
            tl.store(counter, 0)  # ready for the next launch
            _add_up(
                partial + parts * D,
                partial_lse + parts,
                target,
                active,
                v_scale,
                GROUP,
                D,
                D_PAD,
                8192 if EARLY else 4096,
            )


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """How the kernel is cut; results differ only by rounding.

    Attributes:
        tokens: a tile of keys, a power of 2 from 16.
        warps: of a program.
        stages: one more than the tiles that are loaded ahead.
        early: the fused kernel loads keys and values before it waits for ``qkv``. Takes more registers: for few rows.
        registers: of a thread at most, so that more programs run at a time; None: what the compiler takes.
    """

    tokens: int
    warps: int
    stages: int
    early: bool = False
    registers: int | None = None

    @classmethod
    def of(cls, head_dim: int, itemsize: int) -> "DecodeTiles":
        """Good ones for a Hopper GPU, for a cache of ``itemsize`` bytes an element."""
        if head_dim > 128 or itemsize > 2:
            return cls(32, 4, 3)
        # Programs of one warp never wait for another, and leave room for the kernels before and after.
        return cls(32, 1, 3 if itemsize == 1 else 2)


def num_decode_splits(rows: int, kv_heads: int, max_context: int, multiprocessors: int = _MULTIPROCESSORS) -> int:
    """Programs among which a row's keys are split.

    For up to four programs on every multiprocessor (rows times kv heads give the rest), where a program still has 128
    tokens of the longest row to read. ``max_context`` is the most tokens that a row attends to: its context, or the
    window. Shorter rows use fewer splits by themselves, so a captured graph can be made for the longest context.
    """
    wanted = multiprocessors * _PROGRAMS_PER_MULTIPROCESSOR // (rows * kv_heads)
    return max(1, min(wanted, max_context // _MIN_SPLIT))


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Where the splits of a row meet. Launches that follow one another may share it: it is left as it was found.

    Attributes:
        partial: float32, results of the splits.
        lse: float32, base-2 logarithms of the sums of their exponentials.
        counters: int32 zeros, one a row and kv head.
    """

    partial: Tensor
    lse: Tensor
    counters: Tensor

    @classmethod
    def of(
        cls, rows: int, num_heads: int, kv_heads: int, head_dim: int, num_splits: int, device: torch.device | str
    ) -> "DecodeWorkspace":
        """For at most ``rows`` rows, heads and splits."""
        parts = rows * num_heads * num_splits if num_splits > 1 else 0
        return cls(
            torch.empty(parts * head_dim, dtype=torch.float32, device=device),
            torch.empty(parts, dtype=torch.float32, device=device),
            torch.zeros(rows * kv_heads, dtype=torch.int32, device=device),
        )


def decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_len: Tensor,
    *,
    num_splits: int,
    window: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    softmax_scale: float | None = None,
    workspace: DecodeWorkspace | None = None,
    tiles: DecodeTiles | None = None,
    out: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """Attention of each row's last token, whose key and value are in the cache already.

    Args:
        query: ``[rows, q_heads, head_dim]``, rotated.
        key_cache, value_cache: ``[num_blocks, kv_heads, block_size, head_dim]``; float8_e4m3fn holds ``x / scale``.
        block_table: int32 ``[rows, max_blocks]``.
        context_len: int32 ``[rows]``, the query's token included. Padding: 1, with a finite block.
        num_splits: most programs that share a row, from `num_decode_splits`.
        window: a token sees itself and the ``window - 1`` before it; None: all before it.
        softmax_scale: multiplies the scores; ``head_dim ** -0.5`` if None.
        workspace: for ``num_splits > 1``; made anew if None.
        pdl: start before the kernel in front of this one ends (programmatic dependent launch). ``block_table``,
            ``context_len`` and, with early `DecodeTiles`, keys and values of earlier tokens are then read at once:
            between what writes them and this there must be a launch without ``pdl``.

    Returns:
        ``[rows, q_heads, head_dim]`` in the dtype of ``query``.
    """
    if query.dim() != 3 or not query.is_contiguous():
        raise ValueError("query must be [rows, q_heads, head_dim] and contiguous")
    if out is None:
        out = torch.empty_like(query)
    _launch(
        query,
        1,
        (query.shape[0], query.shape[1] * query.shape[2], 0),
        key_cache,
        value_cache,
        block_table,
        context_len,
        (None, None, None, 0.0),
        num_splits,
        window,
        (k_scale, v_scale, softmax_scale),
        workspace,
        tiles,
        out,
        pdl,
    )
    return out


def rotary_decode_attention(
    qkv: Tensor,
    cos_sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_len: Tensor,
    *,
    num_splits: int,
    dtype: torch.dtype | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    window: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    softmax_scale: float | None = None,
    workspace: DecodeWorkspace | None = None,
    tiles: DecodeTiles | None = None,
    out: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """`rotary_cache` and `decode_attention` in one kernel, for steps in which every row has one token.

    Args:
        qkv: ``[rows, (q_heads + 2 * kv_heads) * head_dim]``, or partial sums ``[splits, rows, ...]``. Row ``r`` is at
            position ``context_len[r] - 1``; its key and value are written there.
        cos_sin: from `rotary_cos_sin`.
        dtype: of the result, when ``qkv`` is not in it already.

    Returns:
        ``[rows, q_heads, head_dim]``. Everything else as there.
    """
    check_cache(key_cache, value_cache)
    _, kv_heads, _, head_dim = key_cache.shape
    rows, width = qkv.shape[-2:]
    q_heads = width // head_dim - 2 * kv_heads
    if not qkv.is_contiguous() or q_heads < 1 or width % head_dim:
        raise ValueError(
            f"qkv {tuple(qkv.shape)} must be contiguous, heads of {head_dim}, 2 * {kv_heads} for the cache"
        )
    if (q_norm is None) != (k_norm is None):
        raise ValueError("give both q_norm and k_norm, or neither")
    if out is None:
        out = qkv.new_empty(rows, q_heads, head_dim, dtype=dtype or qkv.dtype)
    _launch(
        qkv,
        1 if qkv.dim() == 2 else qkv.shape[0],
        (rows, width, rows * width),
        key_cache,
        value_cache,
        block_table,
        context_len,
        (cos_sin, q_norm, k_norm, eps),
        num_splits,
        window,
        (k_scale, v_scale, softmax_scale),
        workspace,
        tiles,
        out,
        pdl,
    )
    return out


def _launch(
    query: Tensor,
    qkv_splits: int,
    shape: tuple[int, int, int],
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_len: Tensor,
    rotary: tuple[Tensor | None, Tensor | None, Tensor | None, float],
    num_splits: int,
    window: int | None,
    scales: tuple[float, float, float | None],
    workspace: DecodeWorkspace | None,
    tiles: DecodeTiles | None,
    out: Tensor,
    pdl: bool,
) -> None:
    check_cache(key_cache, value_cache)
    _, kv_heads, block_size, head_dim = key_cache.shape
    rows, query_stride, split_stride = shape
    q_heads = out.shape[1]
    if q_heads % kv_heads:
        raise ValueError(f"{q_heads} query heads cannot share {kv_heads} kv heads evenly")
    if num_splits < 1:
        raise ValueError(f"num_splits must be at least 1, not {num_splits}")
    if rows == 0:
        return
    if num_splits > 1 and workspace is None:
        workspace = DecodeWorkspace.of(rows, q_heads, kv_heads, head_dim, num_splits, out.device)
    if num_splits > 1 and workspace is not None and workspace.lse.numel() < rows * q_heads * num_splits:
        raise ValueError(f"the workspace is too small for {rows} rows and {num_splits} splits")
    cos_sin, q_norm, k_norm, eps = rotary
    k_scale, v_scale, softmax_scale = scales
    tiles = tiles or DecodeTiles.of(head_dim, key_cache.element_size())
    options: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    _decode_kernel[(kv_heads * num_splits, rows)](
        query,
        key_cache,
        value_cache,
        block_table,
        context_len,
        cos_sin,
        q_norm,
        k_norm,
        out,
        workspace.partial if workspace else None,
        workspace.lse if workspace else None,
        workspace.counters if workspace else None,
        num_splits,
        window or 0,
        query_stride,
        split_stride,
        block_table.stride(0),
        key_cache.stride(0),
        value_cache.stride(0),
        (head_dim**-0.5 if softmax_scale is None else softmax_scale) * LOG2_E,
        eps,
        k_scale,
        v_scale,
        KV_HEADS=kv_heads,
        GROUP=q_heads // kv_heads,
        D=head_dim,
        D_PAD=triton.next_power_of_2(head_dim),
        ROWS=max(16, triton.next_power_of_2(q_heads // kv_heads)),
        BLOCK_SIZE=block_size,
        TILE=tiles.tokens,
        STAGES=tiles.stages,
        MIN_TILES=max(1, _MIN_TOKENS // tiles.tokens),
        SPLIT=num_splits > 1,
        WINDOW=window is not None,
        FUSED=cos_sin is not None,
        QKV_SPLITS=qkv_splits,
        NORM=q_norm is not None,
        PAIRS=key_cache.element_size() == 1,
        NATIVE=key_cache.is_cuda,
        EARLY=tiles.early and cos_sin is not None,
        # Warps that share the tokens of a tile would have to meet for a sum: one a column, until the end, spares that.
        SUMS=tiles.tokens if tiles.warps > 1 else 1,
        PDL=pdl,
        num_warps=tiles.warps,
        maxnreg=tiles.registers,
        **options,
    )
