"""The GPU's side of `attention_decode`, and what the prefill kernel shares with it."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paceline.kernels.triton.rotary_cache import as_stored, sum_splits

LOG2_E = 1.4426950408889634
LOWEST = tl.constexpr(-1e30)
"""Below every score, yet finite: differences with it are never NaN."""


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
def decode_kernel(
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
    length = tl.load(context_len + row)
    context = tl.maximum(length, 1)
    first = 0
    if WINDOW:
        first = tl.maximum(context - window, 0)
    start = first // TILE * TILE
    end = context - 1 if FUSED else context  # the fused kernel has the newest token in registers
    # As many splits as the row needs; programs beyond them have nothing to do.
    tiles = tl.cdiv(tl.maximum(end - start, 1), TILE)
    tiles_per_split = tl.maximum(tl.cdiv(tiles, num_splits), MIN_TILES)
    active = tl.cdiv(tiles, tiles_per_split)
    if not FUSED:
        active = tl.where(length == 0, 0, active)
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
