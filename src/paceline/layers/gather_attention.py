"""Paged attention in plain torch: gather the keys and values of a few rows, then torch's fused attention.

The gathered copy lives in scratch memory that a step's rows and layers reuse, so it stays in the processor's cache.
Rows that compute one token go together a few at a time: one by one they cannot keep two threads busy, and all
at once they fall out of the cache.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.norm import rms_norm
from paceline.kernels.rotary import rotary_table, rotate_
from paceline.layers.attention import AttentionBatch, AttentionSpec, HeadNorms
from paceline.layers.kv_cache import KVCache, KVLayout

MASKED_TOKENS = 256
"""Most tokens that share a mask: more tokens cost memory, and work on keys that most of them may not see."""
GROUP_ROWS = 4
"""Most rows of one token that are computed together."""
GROUP_PADDING = 2
"""Longest over shortest context in such a group, at most."""


@dataclass(frozen=True, slots=True)
class _Span:
    """``n`` tokens of a row, one after the other, that see keys up to position ``end``."""

    row: int
    start: int
    """Its first token's place in the step."""
    n: int
    first: int
    """The earliest key that any of them sees."""
    end: int
    causal: bool
    """They are the whole context, more than one token, and no window cuts."""

    @property
    def keys(self) -> int:
        return self.end - self.first


@dataclass(frozen=True, slots=True)
class _Piece:
    """One span of n tokens, or ``r`` spans of one token: what one call computes, with ``m`` keys a span."""

    tokens: int
    """n or r."""
    slots: Tensor
    """Where the keys are, ``[r * m]``; a shorter span repeats its last one."""
    gathered: Tensor
    """Scratch for keys and values, ``[r * m, 2 * kv_heads, head_dim]``."""
    key: Tensor
    """View of it, ``[r, kv_heads, m, head_dim]``."""
    value: Tensor
    mask: Tensor | None
    """Added to the scores, ``[n, m]`` or ``[r, 1, 1, m]``; None: every token sees every key, or ``causal``."""
    causal: bool
    chunk: bool
    """One span of several tokens."""


@dataclass(frozen=True, slots=True)
class _Plan:
    cos: Tensor
    sin: Tensor
    slots: Tensor
    """Where the step's keys and values go, ``[T]``."""
    pieces: list[_Piece]
    order: Tensor | None
    """Token of the step that stands at each place of the pieces, ``[T]``; None: they stand in order."""
    places: Tensor | None
    """The inverse."""


class GatherAttention:
    """Serves every device that torch does; meant for CPUs."""

    name = "gather"

    def __init__(self, spec: AttentionSpec, dtype: torch.dtype) -> None:
        self._spec, self._dtype = spec, dtype

    @staticmethod
    def serves(device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int) -> bool:
        return dtype == kv_dtype and dtype in (torch.float32, torch.bfloat16, torch.float16)

    def make_cache(self, layout: KVLayout, num_blocks: Sequence[int], device: torch.device) -> KVCache:
        return KVCache(layout, num_blocks, device)

    def plan(self, batch: AttentionBatch, group: int, window: int | None, cache: KVCache) -> _Plan:
        spec = self._spec
        cos, sin = rotary_table(batch.positions, spec.inverse_frequencies, spec.rope_scale, self._dtype)
        slots = batch.slots(group, cache.block_size)
        pieces, order = _pieces(batch, group, window, cache)
        if order == sorted(order):
            return _Plan(cos, sin, slots, pieces, None, None)
        tokens = torch.tensor(order, device=slots.device)
        return _Plan(cos, sin, slots, pieces, tokens, tokens.argsort())

    def attend(self, plan: _Plan, qkv: Tensor, norms: HeadNorms | None, cache: KVCache, layer: int) -> Tensor:
        spec = self._spec
        queries, rotated = spec.num_heads, spec.num_heads + spec.num_kv_heads
        heads = qkv.view(-1, rotated + spec.num_kv_heads, spec.head_dim)
        if norms is not None:
            heads[:, :queries] = rms_norm(heads[:, :queries], norms.query, spec.norm_eps)
            heads[:, queries:rotated] = rms_norm(heads[:, queries:rotated], norms.key, spec.norm_eps)
        rotate_(heads[:, :rotated], plan.cos, plan.sin)
        cache.write(layer, plan.slots, heads[:, queries:])
        return self.read(plan, heads[:, :queries], cache, layer)

    def read(self, plan: _Plan, query: Tensor, cache: KVCache, layer: int) -> Tensor:
        """Attention of rotated queries ``[T, heads, head_dim]`` over what the cache holds."""
        data = cache.data[layer]
        tokens, heads, head_dim = query.shape
        kv_heads = cache.layout.num_kv_heads
        shared = heads // kv_heads
        if plan.order is not None:
            query = query.index_select(0, plan.order)
        parts = query.view(tokens, kv_heads, shared, head_dim).split([piece.tokens for piece in plan.pieces])
        out = []
        # Query heads that share a key head: of one token they are the tokens of one attention, of many a batch of them.
        for piece, part in zip(plan.pieces, parts, strict=True):
            torch.index_select(data, 0, piece.slots, out=piece.gathered)
            if not piece.chunk:
                result = F.scaled_dot_product_attention(part, piece.key, piece.value, piece.mask)
                out.append(result.reshape(piece.tokens, -1))
                continue
            result = F.scaled_dot_product_attention(
                part.permute(2, 1, 0, 3),
                piece.key.expand(shared, -1, -1, -1),
                piece.value.expand(shared, -1, -1, -1),
                piece.mask,
                is_causal=piece.causal,
            )
            out.append(result.permute(2, 1, 0, 3).reshape(piece.tokens, -1))
        joined = torch.cat(out)
        return joined if plan.places is None else joined.index_select(0, plan.places)


def _pieces(batch: AttentionBatch, group: int, window: int | None, cache: KVCache) -> tuple[list[_Piece], list[int]]:
    """What to compute, and the tokens of the step in the order in which the pieces hold them."""
    starts, contexts = batch.query_start.tolist(), batch.context_len.tolist()
    spans = [
        span
        for row, context in enumerate(contexts)
        for span in _spans(row, starts[row], starts[row + 1] - starts[row], context, window)
    ]
    chunks = [span for span in spans if span.n > 1]
    groups = [*([span] for span in chunks), *_groups([span for span in spans if span.n == 1])]
    data = cache.data[0]
    scratch = data.new_empty(max((len(g) * g[-1].keys for g in groups), default=0), *data.shape[1:])
    slots = _slots(batch.block_tables[group], max(contexts, default=0), cache.block_size)
    mask = _mask([span for span in chunks if not span.causal], window, scratch)
    pieces = [_piece(members, slots, scratch, mask) for members in groups]
    return pieces, [token for members in groups for span in members for token in range(span.start, span.start + span.n)]


def _groups(spans: list[_Span]) -> Iterator[list[_Span]]:
    """Puts spans of one token together, the longest of each group last."""
    members: list[_Span] = []
    for span in sorted(spans, key=lambda span: span.keys):
        if members and (len(members) == GROUP_ROWS or span.keys > GROUP_PADDING * members[0].keys):
            yield members
            members = []
        members.append(span)
    if members:
        yield members


def _piece(spans: list[_Span], slots: Tensor, scratch: Tensor, mask: Tensor) -> _Piece:
    """Spans of one token, or one longer span, whose mask is the bottom right corner of ``mask``."""
    last = spans[-1]
    rows, m = len(spans), last.keys
    positions = torch.arange(m, device=slots.device).expand(rows, m)
    lens = torch.tensor([span.keys for span in spans], device=slots.device).unsqueeze(1)
    firsts = torch.tensor([span.first for span in spans], device=slots.device).unsqueeze(1)
    index = torch.tensor([span.row for span in spans], device=slots.device).unsqueeze(1)
    gathered = scratch[: rows * m]
    key, value = gathered.view(rows, m, *scratch.shape[1:]).transpose(1, 2).chunk(2, 1)
    chunk = last.n > 1
    corner = None
    if chunk and not last.causal:
        corner = mask[len(mask) - last.n :, mask.shape[1] - m :]
    elif spans[0].keys < m:
        corner = torch.zeros(rows, m, dtype=scratch.dtype, device=scratch.device)
        corner = corner.masked_fill_(positions >= lens, -torch.inf).view(rows, 1, 1, m)
    return _Piece(
        tokens=last.n if chunk else rows,
        slots=slots[index, firsts + torch.minimum(positions, lens - 1)].flatten(),
        gathered=gathered,
        key=key,
        value=value,
        mask=corner,
        causal=last.causal,
        chunk=chunk,
    )


def _spans(row: int, place: int, n: int, context: int, window: int | None) -> Iterator[_Span]:
    """Cuts a row's last ``n`` of ``context`` tokens into spans; the first of them has this ``place`` in the step."""
    causal = n > 1 and n == context and (window is None or context <= window)
    start = context - n
    while start < context:
        end = context if causal else min(start + MASKED_TOKENS, context)
        first = 0 if window is None else max(0, start - window + 1)
        yield _Span(row, place + start - (context - n), end - start, first, end, causal)
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
    m = max((span.keys for span in spans), default=0)
    distance = torch.arange(m - n, m, device=like.device).unsqueeze(1) - torch.arange(m, device=like.device)
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    return torch.zeros(n, m, dtype=like.dtype, device=like.device).masked_fill_(hidden, -torch.inf)
