"""Attention over a paged cache, written out: the reference for every backend."""

import torch
from torch import Tensor


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    block_table: Tensor,
    block_size: int,
    window: int | None,
) -> Tensor:
    """Causal softmax attention, one token and one key at a time, in float32. Slow: tests compare the fast ones
    with it, and nothing else calls it.

    Args:
        query: ``[T, heads, head_dim]``; row r has tokens ``query_start[r]`` to ``query_start[r + 1]``.
        keys, values: ``[slots, kv_heads, head_dim]``; query head ``h`` reads kv head ``h // (heads / kv_heads)``.
        query_start: int64 ``[rows + 1]``.
        context_len: int64 ``[rows]``, the step's tokens included.
        block_table: int64 ``[rows, max_blocks]``.
        window: a token sees itself and the ``window - 1`` before it; None: all before it.

    Returns:
        ``[T, heads, head_dim]`` in the dtype of ``query``.
    """
    repeat = query.shape[1] // keys.shape[1]
    out = torch.empty_like(query)
    for row in range(len(context_len)):
        start, end = int(query_start[row]), int(query_start[row + 1])
        for token in range(start, end):
            position = int(context_len[row]) - (end - token)
            first = 0 if window is None else max(0, position - window + 1)
            slots = [
                int(block_table[row, p // block_size]) * block_size + p % block_size for p in range(first, position + 1)
            ]
            k = keys[slots].float().repeat_interleave(repeat, 1)
            v = values[slots].float().repeat_interleave(repeat, 1)
            scores = torch.einsum("hd,khd->hk", query[token].float(), k) * query.shape[-1] ** -0.5
            out[token] = torch.einsum("hk,khd->hd", scores.softmax(-1), v).to(query.dtype)
    return out
