"""The rows of a prefill step as cuDNN reads them, and what its kernel needs of the cache beforehand."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MIN_QUERY = 2048
"""Smallest maximum of a row's query tokens that a plan is built for."""


def power_of_2(n: int, at_least: int = 1) -> int:
    """The smallest power of 2 that is not less than either."""
    return 1 << (max(n, at_least) - 1).bit_length()


@triton.jit(
    do_not_specialize=["rows", "table_stride", "copy_width"],
    do_not_specialize_on_alignment=["block_table", "query_start", "context_len"],
)
def _rows_kernel(
    block_table,
    query_start,
    context_len,
    query_lens,
    context_lens,
    offsets,
    table,
    rows,
    table_stride,
    token_elements,
    width,
    copy_width,
    block_size,
    COPIED: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """``table`` gets the row's blocks, or (COPIED) their places in a copy of ``copy_width`` blocks a row.

    A tile of keys may reach past a context. What lies there is masked, but it is read, so it must be the row's: its
    first block.
    """
    row = tl.program_id(0)
    known = row < rows
    start = tl.load(query_start + tl.minimum(row, rows))
    end = tl.load(query_start + tl.minimum(row + 1, rows))
    context = tl.load(context_len + row, mask=known, other=0)
    if tl.program_id(1) == 0:
        tl.store(query_lens + row, end - start)
        tl.store(context_lens + row, context)
        tl.store(offsets + row, start * token_elements)
        tl.store(offsets + row + 1, end * token_elements)
    entry = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    place = tl.where(entry * block_size < context, entry, 0)
    if COPIED:
        block = row * copy_width + place
    else:
        block = tl.load(block_table + row.to(tl.int64) * table_stride + place, mask=known & (entry < width), other=0)
    tl.store(table + row.to(tl.int64) * width + entry, block, mask=entry < width)


@triton.jit
def _clear_kernel(
    values, table, context_lens, width, value_stride, BLOCK_SIZE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr
):
    """Zeros in the unwritten slots of a row's last block."""
    row = tl.program_id(0)
    context = tl.load(context_lens + row)
    if context % BLOCK_SIZE == 0:
        return
    block = tl.load(table + row.to(tl.int64) * width + context // BLOCK_SIZE).to(tl.int64)
    slot = tl.arange(0, BLOCK_SIZE)[:, None]
    d = tl.arange(0, D_PAD)[None, :]
    place = values + block * value_stride + (tl.program_id(1) * BLOCK_SIZE + slot) * D + d
    tl.store(place, tl.zeros(place.shape, values.dtype.element_ty), mask=(slot >= context % BLOCK_SIZE) & (d < D))


@triton.jit(do_not_specialize=["table_stride", "width"], do_not_specialize_on_alignment=["block_table"])
def _widen_kernel(
    key_cache,
    value_cache,
    block_table,
    context_lens,
    keys,
    values,
    table_stride,
    width,
    key_stride,
    value_stride,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
):
    """Copies a block of a row into 16 bits; zeros past its context."""
    row = tl.program_id(1)
    first = tl.program_id(0) * BLOCK_SIZE
    context = tl.load(context_lens + row)
    if first >= context:
        return
    block = tl.load(block_table + row.to(tl.int64) * table_stride + tl.program_id(0)).to(tl.int64)
    slot = tl.arange(0, BLOCK_SIZE)[:, None]
    d = tl.arange(0, D_PAD)[None, :]
    inside = d < D
    seen = inside & (first + slot < context)
    target = (row.to(tl.int64) * width + tl.program_id(0)) * (KV_HEADS * BLOCK_SIZE * D)
    for head in range(KV_HEADS):
        place = (head * BLOCK_SIZE + slot) * D + d
        k = tl.load(key_cache + block * key_stride + place, mask=seen, other=0.0)
        v = tl.load(value_cache + block * value_stride + place, mask=seen, other=0.0)
        # By way of float16, in which a float8 is exact and to which one instruction leads.
        tl.store(keys + target + place, k.to(tl.float16).to(keys.dtype.element_ty), mask=inside)
        tl.store(values + target + place, v.to(tl.float16).to(values.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """The rows of one step as cuDNN reads them; made once a step, used by every layer.

    Attributes:
        max_query, max_context: tokens of a row, rounded up.
        query_lens, context_lens: int32 ``[rows]``, rows rounded up; 0 for the rows that were added.
        offsets: int32 ``[rows + 1]``, the elements of the queries before each row.
        table: int32 ``[rows, max_context / block_size]``; past its context a row repeats its first block.
        source: int32 ``[rows, max_blocks]``, the block tables as they were given.
        copied: keys and values are copied, because cuDNN does not read them as they are stored; ``copied`` blocks a
            row. 0: they are read where they are.
    """

    max_query: int
    max_context: int
    query_lens: Tensor
    context_lens: Tensor
    offsets: Tensor
    table: Tensor
    source: Tensor
    copied: int

    @classmethod
    def of(
        cls,
        block_table: Tensor,
        query_start: Tensor,
        context_len: Tensor,
        max_query_len: int,
        max_context: int,
        *,
        limit: int,
        block_size: int,
        token_elements: int,
        copy: bool = False,
    ) -> "PrefillRows":
        """Rounds up what a plan depends on; one launch, and nothing waits for the device.

        Args:
            block_table: int32 ``[rows, max_blocks]``, of any width that holds the contexts.
            query_start: int32 ``[rows + 1]``: row ``r`` has tokens ``query_start[r]`` to ``query_start[r + 1]``.
            context_len: int32 ``[rows]``, the row's query tokens included.
            max_query_len, max_context: at least the most of a row.
            limit: the longest context that any step has; plans are built for it.
            block_size: a power of 2.
            token_elements: ``q_heads * head_dim``.
            copy: keys and values are to be copied.
        """
        rows = len(context_len)
        padded = power_of_2(rows)
        longest = power_of_2(limit, block_size)
        width = longest // block_size
        copied = -(-max_context // block_size) if copy else 0
        # Zeros, because `side_by_side` may leave the kernel out, and cuDNN takes these for places.
        ints = torch.zeros(3 * padded + 1 + padded * width, dtype=torch.int32, device=block_table.device)
        query_lens, context_lens, offsets, table = ints.split([padded, padded, padded + 1, padded * width])
        entries = min(1024, power_of_2(width))
        _rows_kernel[(padded, triton.cdiv(width, entries))](
            block_table,
            query_start,
            context_len,
            query_lens,
            context_lens,
            offsets,
            table,
            rows,
            block_table.stride(0),
            token_elements,
            width,
            copied,
            block_size,
            COPIED=copy,
            ENTRIES=entries,
        )
        return cls(
            power_of_2(max_query_len, MIN_QUERY),
            longest,
            query_lens,
            context_lens,
            offsets,
            table.view(padded, width),
            block_table,
            copied,
        )


def clear_tails(values: Tensor, rows: PrefillRows) -> None:
    """Zeros in the unwritten slots of each row's last block of ``[num_blocks, kv_heads, block_size, head_dim]``."""
    _, kv_heads, block_size, head_dim = values.shape
    _clear_kernel[(len(rows.query_lens), kv_heads)](
        values,
        rows.table,
        rows.context_lens,
        rows.table.shape[1],
        values.stride(0),
        BLOCK_SIZE=block_size,
        D=head_dim,
        D_PAD=power_of_2(head_dim),
    )


def widened(keys: Tensor, values: Tensor, rows: PrefillRows, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The rows' blocks of a float8 cache in ``dtype``, ``[rows * copied, kv_heads, block_size, head_dim]``."""
    _, kv_heads, block_size, head_dim = keys.shape
    count = len(rows.source)
    shape = (count * rows.copied, kv_heads, block_size, head_dim)
    wide_keys, wide_values = (torch.empty(shape, dtype=dtype, device=keys.device) for _ in range(2))
    _widen_kernel[(rows.copied, count)](
        keys,
        values,
        rows.source,
        rows.context_lens,
        wide_keys,
        wide_values,
        rows.source.stride(0),
        rows.copied,
        keys.stride(0),
        values.stride(0),
        KV_HEADS=kv_heads,
        BLOCK_SIZE=block_size,
        D=head_dim,
        D_PAD=power_of_2(head_dim),
    )
    return wide_keys, wide_values
