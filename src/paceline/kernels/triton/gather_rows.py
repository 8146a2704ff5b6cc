"""The input of a decode step, gathered from the rows that the device keeps."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

_ENTRIES = 1024
"""Table entries that one program copies."""


@triton.jit
def _gather_rows_kernel(
    rows,
    context_len,
    known,
    last_token,
    table,
    tokens,
    positions,
    out_table,
    table_stride,
    out_stride,
    block_size,
    ENTRIES: tl.constexpr,
):
    i = tl.program_id(0)
    row = tl.load(rows + i).to(tl.int64)
    context = tl.load(context_len + i)
    if tl.program_id(1) == 0:
        token = tl.load(known + i)
        tl.store(tokens + i, tl.where(token >= 0, token, tl.load(last_token + row)))
        tl.store(positions + i, context - 1)
    entry = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    mask = entry < tl.cdiv(context, block_size)
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
    out_tables: Sequence[Tensor],
) -> None:
    """Fills the input of a step in which each of ``n`` rows computes one token. All tensors are int32.

    Args:
        rows, context_len, known: ``[n]``: the row, its tokens once the step is computed, and its token; a negative
            ``known`` stands for ``last_token`` of the row.
        last_token: ``[max_rows]``.
        tables: per KV group ``[max_rows, max_blocks]``.
        tokens, positions: ``[n]``, written.
        out_tables: per KV group ``[n, max_blocks]``, written as far as the context reaches.
    """
    for table, out_table in zip(tables, out_tables, strict=True):
        _gather_rows_kernel[(len(rows), triton.cdiv(table.shape[1], _ENTRIES))](
            rows,
            context_len,
            known,
            last_token,
            table,
            tokens,
            positions,
            out_table,
            table.stride(0),
            out_table.stride(0),
            block_size,
            ENTRIES=_ENTRIES,
            num_warps=4,
        )
