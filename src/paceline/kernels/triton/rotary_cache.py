"""What lies between the QKV projection and attention, as one kernel: head norms, rotary embedding, cache write."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

FLOAT8_MAX = tl.constexpr(448.0)
"""Largest finite value of float8_e4m3fn."""

_HEADS = 16
"""Heads that one program takes."""


@triton.jit
def sum_splits(pointers, mask, stride, SPLITS: tl.constexpr):
    """Elements at ``pointers``, or the sum of ``SPLITS`` of them ``stride`` apart, in order; float32."""
    total = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(pointers + split * stride, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def as_stored(x, scale, cache_type: tl.constexpr):
    """``x / scale`` in the dtype of the cache; float8 saturates."""
    if cache_type.primitive_bitwidth == 8:
        x = tl.clamp(x / scale, -FLOAT8_MAX, FLOAT8_MAX)
    return x.to(cache_type)


@triton.jit(do_not_specialize=["split_stride", "table_stride"])
def _rotary_cache_kernel(
    qkv,
    positions,
    slots,
    rows,
    block_table,
    cos_sin,
    q_norm,
    k_norm,
    query,
    key_cache,
    value_cache,
    split_stride,
    table_stride,
    key_stride,
    value_stride,
    eps,
    k_scale,
    v_scale,
    SPLITS: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, HALF_PAD)
    in_head = d < HALF
    is_query = head < Q_HEADS
    is_key = (head >= Q_HEADS) & (head < Q_HEADS + KV_HEADS)
    is_value = (head >= Q_HEADS + KV_HEADS) & (head < Q_HEADS + 2 * KV_HEADS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    position = tl.load(positions + token)
    if HAS_SLOTS:
        slot = tl.load(slots + token)
        block = slot // BLOCK_SIZE
        offset = slot % BLOCK_SIZE
    else:
        row = tl.load(rows + token).to(tl.int64)
        block = tl.load(block_table + row * table_stride + position // BLOCK_SIZE)
        offset = position % BLOCK_SIZE

    source = qkv + token * ((Q_HEADS + 2 * KV_HEADS) * 2 * HALF) + head[:, None] * (2 * HALF) + d[None, :]
    mask = (is_query | is_key | is_value)[:, None] & in_head[None, :]
    left = sum_splits(source, mask, split_stride, SPLITS)
    right = sum_splits(source + HALF, mask, split_stride, SPLITS)
    rotated = (is_query | is_key)[:, None]
    if NORM:
        square = tl.sum(left * left, 1) + tl.sum(right * right, 1)
        scale = tl.rsqrt(square / (2 * HALF) + eps)[:, None]
        queries = is_query[:, None]
        q_left = tl.load(q_norm + d, mask=in_head, other=0.0).to(tl.float32)[None, :]
        k_left = tl.load(k_norm + d, mask=in_head, other=0.0).to(tl.float32)[None, :]
        q_right = tl.load(q_norm + HALF + d, mask=in_head, other=0.0).to(tl.float32)[None, :]
        k_right = tl.load(k_norm + HALF + d, mask=in_head, other=0.0).to(tl.float32)[None, :]
        left = tl.where(rotated, left * scale * tl.where(queries, q_left, k_left), left)
        right = tl.where(rotated, right * scale * tl.where(queries, q_right, k_right), right)
    angles = cos_sin + position.to(tl.int64) * (2 * HALF) + d
    cos = tl.load(angles, mask=in_head, other=0.0)[None, :]
    sin = tl.load(angles + HALF, mask=in_head, other=0.0)[None, :]
    left, right = (
        tl.where(rotated, left * cos - right * sin, left),
        tl.where(rotated, right * cos + left * sin, right),
    )

    target = query + (token * Q_HEADS + head[:, None]) * (2 * HALF) + d[None, :]
    queries = is_query[:, None] & in_head[None, :]
    tl.store(target, left.to(query.dtype.element_ty), mask=queries)
    tl.store(target + HALF, right.to(query.dtype.element_ty), mask=queries)
    cache_type: tl.constexpr = key_cache.dtype.element_ty
    block = block.to(tl.int64)
    target = (
        key_cache + block * key_stride + ((head - Q_HEADS)[:, None] * BLOCK_SIZE + offset) * (2 * HALF) + d[None, :]
    )
    keys = is_key[:, None] & in_head[None, :]
    tl.store(target, as_stored(left, k_scale, cache_type), mask=keys)
    tl.store(target + HALF, as_stored(right, k_scale, cache_type), mask=keys)
    value_head = head - Q_HEADS - KV_HEADS
    target = value_cache + block * value_stride + (value_head[:, None] * BLOCK_SIZE + offset) * (2 * HALF) + d[None, :]
    values = is_value[:, None] & in_head[None, :]
    tl.store(target, as_stored(left, v_scale, cache_type), mask=values)
    tl.store(target + HALF, as_stored(right, v_scale, cache_type), mask=values)


def rotary_cos_sin(inverse_frequencies: Tensor, max_position: int, attention_factor: float = 1.0) -> Tensor:
    """Table of rotary angles, made once for a model.

    Args:
        inverse_frequencies: float32 ``[head_dim / 2]``, radians per position.
        max_position: rows of the table.
        attention_factor: multiplies cosine and sine.

    Returns:
        float32 ``[max_position, head_dim]``: the cosines of a position, then its sines.
    """
    positions = torch.arange(max_position, dtype=torch.float32, device=inverse_frequencies.device)
    angles = positions[:, None] * inverse_frequencies
    return torch.cat((angles.cos(), angles.sin()), -1).mul_(attention_factor)


def check_cache(key_cache: Tensor, value_cache: Tensor) -> None:
    """Raises ValueError unless both are ``[num_blocks, kv_heads, block_size, head_dim]``, each block contiguous."""
    if key_cache.shape != value_cache.shape or key_cache.dtype != value_cache.dtype:
        raise ValueError("keys and values must have the same shape and dtype")
    for cache in (key_cache, value_cache):
        if cache.dim() != 4 or not cache[0].is_contiguous():
            raise ValueError("a cache must be [num_blocks, kv_heads, block_size, head_dim] with contiguous blocks")


def rotary_cache(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    rows: Tensor | None = None,
    block_table: Tensor | None = None,
    slots: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """Normalises (optionally) and rotates the heads of queries and keys, and writes keys and values to the cache.

    All arithmetic is in float32 and each result is rounded once.

    Args:
        qkv: ``[T, (q_heads + 2 * kv_heads) * head_dim]``, or partial sums ``[splits, T, ...]`` that are added up first.
        positions: int32 ``[T]``.
        cos_sin: from `rotary_cos_sin`.
        key_cache, value_cache: ``[num_blocks, kv_heads, block_size, head_dim]``; float8_e4m3fn holds ``x / scale``.
        rows, block_table: int32 ``[T]``, row of each token, and ``[rows, max_blocks]``; or instead of both:
        slots: int32 or int64 ``[T]``: ``block * block_size + offset`` of each token.
        q_norm, k_norm: weights ``[head_dim]`` of an RMSNorm over each head, as in Qwen3; both or neither.
        dtype: of the result, when ``qkv`` is not in it already.
        out: where to put the queries.
        pdl: launched before the previous kernel ends, and waits for it.

    Returns:
        The queries, ``[T, q_heads, head_dim]``.
    """
    check_cache(key_cache, value_cache)
    _, kv_heads, block_size, head_dim = key_cache.shape
    splits, tokens = (1 if qkv.dim() == 2 else qkv.shape[0]), qkv.shape[-2]
    q_heads = qkv.shape[-1] // head_dim - 2 * kv_heads
    if not qkv.is_contiguous() or q_heads < 1 or qkv.shape[-1] % head_dim:
        raise ValueError(
            f"qkv {tuple(qkv.shape)} must be contiguous, heads of {head_dim}, 2 * {kv_heads} for the cache"
        )
    if (slots is None) == (block_table is None) or (rows is None) != (block_table is None):
        raise ValueError("give either slots, or rows and block_table")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("give both q_norm and k_norm, or neither")
    if out is None:
        out = qkv.new_empty(tokens, q_heads, head_dim, dtype=dtype or qkv.dtype)
    if tokens == 0:
        return out
    heads = q_heads + 2 * kv_heads
    _rotary_cache_kernel[(tokens, triton.cdiv(heads, _HEADS))](
        qkv,
        positions,
        slots if slots is not None else positions,
        rows if rows is not None else positions,
        block_table if block_table is not None else positions,
        cos_sin,
        q_norm if q_norm is not None else cos_sin,
        k_norm if k_norm is not None else cos_sin,
        out,
        key_cache,
        value_cache,
        tokens * qkv.shape[-1],
        0 if block_table is None else block_table.stride(0),
        key_cache.stride(0),
        value_cache.stride(0),
        eps,
        k_scale,
        v_scale,
        SPLITS=splits,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        HALF_PAD=triton.next_power_of_2(head_dim // 2),
        BLOCK_SIZE=block_size,
        HEADS=_HEADS,
        NORM=q_norm is not None,
        HAS_SLOTS=slots is not None,
        PDL=pdl,
        num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out
