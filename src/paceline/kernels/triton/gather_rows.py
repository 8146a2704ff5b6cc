"""The input of a decode step, gathered from the rows that the device keeps."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

_ENTRIES = 1024
"""Table entries that are copied at once."""


@triton.jit
def _gather_rows_kernel(
    rows,
    context_len,
    known,
    last_token,
    table,
    tokens,
    positions,
    lengths,
    out_table,
    table_stride,
    out_stride,
    block_size,
    LAST: tl.constexpr,
    ENTRIES: tl.constexpr,
    PDL: tl.constexpr,
):
    i = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
    row = tl.load(rows + i).to(tl.int64)
    context = tl.load(context_len + i)
    if LAST:
        token = tl.load(known + i)
        sampled = token < 0
        tl.store(tokens + i, tl.where(sampled, tl.load(last_token + row), token))
        tl.store(positions + i, context - 1)
        tl.store(lengths + i, context)
        tl.debug_barrier()  # all of the program has read the context
        tl.store(context_len + i, context + sampled.to(tl.int32))
    count = tl.cdiv(context, block_size)
    for first in range(0, count, ENTRIES):
        entry = first + tl.arange(0, ENTRIES)
        mask = entry < count
        block = tl.load(table + row * table_stride + entry, mask=mask, other=0)
        tl.store(out_table + i.to(tl.int64) * out_stride + entry, block, mask=mask)


def gather_rows(
    rows: Tensor,
    context_len: Tensor,
    known: Tensor,
    last_token: Tensor,
    tables: Sequence[Tensor],
    *,
    block_size: int,
    tokens: Tensor,
    positions: Tensor,
    lengths: Tensor,
    out_tables: Sequence[Tensor],
    pdl: bool = False,
) -> None:
    """Fills the input of a step in which each of ``n`` rows computes one token. All tensors are int32.

    Args:
        rows, context_len, known: ``[n]``: the row, its tokens once the step is computed, and its token; a negative
            ``known`` stands for ``last_token`` of the row, and adds 1 to ``context_len``: what was the input of this
            step is that of the next, if the same rows go on.
        last_token: ``[max_rows]``.
        tables: per KV group ``[max_rows, max_blocks]``.
        tokens, positions, lengths: ``[n]``, written; ``lengths`` are what ``context_len`` was.
        out_tables: per KV group ``[n, max_blocks]``, written as far as the context reaches.
        pdl: the kernel behind may be set up while this one runs (programmatic dependent launch).
    """
    for group, (table, out_table) in reversed(list(enumerate(zip(tables, out_tables, strict=True)))):
        _gather_rows_kernel[(len(rows),)](
            rows,
            context_len,
            known,
            last_token,
            table,
            tokens,
            positions,
            lengths,
            out_table,
            table.stride(0),
            out_table.stride(0),
            block_size,
            LAST=group == 0,
            ENTRIES=_ENTRIES,
            PDL=pdl and group == 0,
            num_warps=4,
        )
