"""Paged attention in plain torch, row by row: gather a row's keys and values, then torch's fused attention.

The gathered copy lives in scratch memory that a step's rows and layers reuse, so it stays in the processor's cache: on
two cores this beats padded batches and split contexts, which also make a row's rounding depend on its neighbours.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.layers.attention import AttentionBatch
from paceline.layers.kv_cache import KVCache

MASKED_TOKENS = 256
"""Most tokens that share a mask: more tokens cost memory, and work on keys that most of them may not see."""


@dataclass(frozen=True, slots=True)
class _Span:
    """``n`` tokens of a row, one after the other, that see keys up to position ``end``."""

    row: int
    n: int
    first: int
    """The earliest key that any of them sees."""
    end: int
    causal: bool
    """They are the whole context, and no window cuts."""

    @property
    def masked(self) -> bool:
        return self.n > 1 and not self.causal


@dataclass(frozen=True, slots=True)
class _Piece:
    """A span with its ``m = end - first`` keys."""

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


@dataclass(frozen=True, slots=True)
class _Plan:
    lens: list[int]
    """Tokens of each piece."""
    pieces: list[_Piece]


class GatherAttention:
    """Serves every device that torch does; meant for CPUs."""

    name = "gather"

    @staticmethod
    def serves(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
        return dtype in (torch.float32, torch.bfloat16, torch.float16)

    def plan(self, batch: AttentionBatch, group: int, window: int | None, cache: KVCache) -> _Plan:
        lens, contexts = batch.query_start.diff().tolist(), batch.context_len.tolist()
        spans = [
            span
            for row, (n, context) in enumerate(zip(lens, contexts, strict=True))
            for span in _spans(row, n, context, window)
        ]
        data = cache.data[0]
        scratch = data.new_empty(max((span.end - span.first for span in spans), default=0), *data.shape[1:])
        slots = _slots(batch.block_tables[group], max(contexts, default=0), cache.block_size)
        mask = _mask([span for span in spans if span.masked], window, scratch)
        pieces = []
        for span in spans:
            m = span.end - span.first
            gathered = scratch[:m]
            key, value = gathered.transpose(0, 1).unsqueeze(0).chunk(2, 1)
            corner = mask[len(mask) - span.n :, mask.shape[1] - m :] if span.masked else None
            pieces.append(_Piece(slots[span.row, span.first : span.end], gathered, key, value, corner, span.causal))
        return _Plan([span.n for span in spans], pieces)

    def attend(self, plan: _Plan, query: Tensor, cache: KVCache, layer: int) -> Tensor:
        data = cache.data[layer]
        tokens, heads, head_dim = query.shape
        kv_heads = cache.layout.num_kv_heads
        shared = heads // kv_heads
        parts = query.view(tokens, kv_heads, shared, head_dim).split(plan.lens)
        out = []
        # Query heads that share a key head: of one token they are the tokens of one attention, of many a batch of them.
        for piece, part in zip(plan.pieces, parts, strict=True):
            torch.index_select(data, 0, piece.slots, out=piece.gathered)
            if len(part) == 1:
                out.append(F.scaled_dot_product_attention(part, piece.key, piece.value).view(1, -1))
                continue
            result = F.scaled_dot_product_attention(
                part.permute(2, 1, 0, 3),
                piece.key.expand(shared, -1, -1, -1),
                piece.value.expand(shared, -1, -1, -1),
                piece.mask,
                is_causal=piece.causal,
            )
            out.append(result.permute(2, 1, 0, 3).reshape(len(part), -1))
        return torch.cat(out)


def _spans(row: int, n: int, context: int, window: int | None) -> Iterator[_Span]:
    """Cuts a row's last ``n`` of ``context`` tokens into spans."""
    causal = n > 1 and n == context and (window is None or context <= window)
    start = context - n
    while start < context:
        end = context if causal else min(start + MASKED_TOKENS, context)
        first = 0 if window is None else max(0, start - window + 1)
        yield _Span(row, end - start, first, end, causal)
        start = end


def _slots(block_table: Tensor, length: int, block_size: int) -> Tensor:
    """Cache slots of each row's first ``length`` tokens, ``[rows, length]``, rounded up to whole blocks."""
    blocks = block_table[:, : -(-length // block_size)]
    offsets = torch.arange(block_size, device=block_table.device)
    return (blocks.unsqueeze(-1) * block_size + offsets).flatten(1)


def _mask(spans: list[_Span], window: int | None, like: Tensor) -> Tensor:
    """0 where a token sees a key, -inf elsewhere; the last token sees the last key.

    The mask of a span with n tokens and m keys is the bottom right corner ``[n, m]`` of this one, because only the
    distance between token and key matters.
    """
    n = max((span.n for span in spans), default=0)
    m = max((span.end - span.first for span in spans), default=0)
    distance = torch.arange(m - n, m, device=like.device).unsqueeze(1) - torch.arange(m, device=like.device)
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    return torch.zeros(n, m, dtype=like.dtype, device=like.device).masked_fill_(hidden, -torch.inf)
