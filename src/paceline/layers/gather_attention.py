"""Paged attention in plain torch, row by row: gather a row's keys and values, then torch's fused attention.

The gathered copy lives in scratch memory that all rows and layers reuse, so it stays in the processor's cache: on two
cores this beats padded batches and split contexts, which also make a row's rounding depend on its neighbours.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.layers.attention import AttentionBatch
from paceline.layers.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class _Row:
    """``n`` tokens of one row and the ``m`` keys that they may see."""

    slots: Tensor
    """Where the keys are, ``[m]``."""
    gathered: Tensor
    """Scratch for keys and values, ``[m, 2 * kv_heads, head_dim]``."""
    key: Tensor
    """View of it, ``[1, kv_heads, m, head_dim]``."""
    value: Tensor
    mask: Tensor | None
    """Added to the scores, ``[n, m]``; None: every token sees every key, or ``causal``."""
    causal: bool
    """Keys and tokens are the same positions, and no window cuts."""


@dataclass(frozen=True, slots=True)
class _Plan:
    lens: list[int]
    """Tokens of each row that has any."""
    rows: list[_Row]


class GatherAttention:
    """Serves every device that torch does; meant for CPUs."""

    name = "gather"

    def __init__(self) -> None:
        self._scratch = torch.empty(0)

    @staticmethod
    def serves(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
        return dtype in (torch.float32, torch.bfloat16, torch.float16)

    def plan(self, batch: AttentionBatch, group: int, window: int | None, cache: KVCache) -> _Plan:
        contexts = batch.context_len.tolist()
        lens = batch.query_start.diff().tolist()
        firsts = [0 if window is None else max(0, c - n - window + 1) for n, c in zip(lens, contexts, strict=True)]
        scratch = self._reserve(max((c - f for c, f in zip(contexts, firsts, strict=True)), default=0), cache)
        slots = _slots(batch.block_tables[group], max(contexts, default=0), cache.block_size)
        rows = []
        for row, (first, context, n) in enumerate(zip(firsts, contexts, lens, strict=True)):
            if n == 0:
                continue
            gathered = scratch[: context - first]
            heads_first = gathered.transpose(0, 1).unsqueeze(0)
            key, value = heads_first.chunk(2, 1)
            cut = window is not None and context > window
            causal = n > 1 and n == context and not cut
            mask = None if causal or n == 1 else _mask(n, context, first, window, scratch)
            rows.append(_Row(slots[row, first:context], gathered, key, value, mask, causal))
        return _Plan([n for n in lens if n], rows)

    def attend(self, plan: _Plan, query: Tensor, cache: KVCache, layer: int) -> Tensor:
        data = cache.data[layer]
        kv_heads, head_dim = cache.layout.num_kv_heads, cache.layout.head_dim
        tokens, heads, _ = query.shape
        shared = heads // kv_heads
        out = []
        # Heads that share a key head: of one token they are the "tokens" of one attention, of many a batch of them.
        for row, queries in zip(
            plan.rows, query.view(tokens, kv_heads, shared, head_dim).split(plan.lens), strict=True
        ):
            torch.index_select(data, 0, row.slots, out=row.gathered)
            if len(queries) == 1:
                out.append(F.scaled_dot_product_attention(queries, row.key, row.value).view(1, -1))
                continue
            result = F.scaled_dot_product_attention(
                queries.permute(2, 1, 0, 3),
                row.key.expand(shared, -1, -1, -1),
                row.value.expand(shared, -1, -1, -1),
                row.mask,
                is_causal=row.causal,
            )
            out.append(result.permute(2, 1, 0, 3).reshape(len(queries), -1))
        return torch.cat(out)

    def _reserve(self, tokens: int, cache: KVCache) -> Tensor:
        """Scratch for this many tokens, ``[at least tokens, 2 * kv_heads, head_dim]``."""
        data = cache.data[0]
        if len(self._scratch) < tokens or self._scratch.dtype != data.dtype or self._scratch.device != data.device:
            self._scratch = data.new_empty(tokens + tokens // 4, *data.shape[1:])
        return self._scratch


def _slots(block_table: Tensor, length: int, block_size: int) -> Tensor:
    """Cache slots of each row's first ``length`` tokens, ``[rows, length]``."""
    blocks = block_table[:, : -(-length // block_size)]
    offsets = torch.arange(block_size, device=block_table.device)
    return (blocks.unsqueeze(-1) * block_size + offsets).flatten(1)


def _mask(n: int, context: int, first: int, window: int | None, like: Tensor) -> Tensor:
    """0 where one of the last ``n`` tokens sees a key, -inf elsewhere: ``[n, context - first]``."""
    queries = torch.arange(context - n, context, device=like.device).unsqueeze(1)
    keys = torch.arange(first, context, device=like.device)
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return torch.zeros(n, context - first, dtype=like.dtype, device=like.device).masked_fill_(hidden, -torch.inf)
