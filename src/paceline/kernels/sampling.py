"""Chooses each row's next token from its logits. Plain torch, on any device: the reference for faster versions.

Rows are independent: a row's token is the same bit for bit alone, in any batch and in any order. So nothing here sums
over a row with an operation that splits its work by the number of rows (`sum`, `logsumexp`); `cumsum` does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.penalties import TokenCounts, penalise
from paceline.kernels.philox import uniforms
from paceline.kernels.ranking import ranked

CANDIDATES = 1024
"""Most likely tokens among which filtered rows are first drawn; rows that keep more are sorted as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomRows:
    """Rows that draw from their whole distribution."""

    rows: Tensor
    """int64 ``[N]``: which of the batch."""
    temperature: Tensor
    """float32 ``[N, 1]``."""
    seed: Tensor
    """int64 ``[N]``."""
    candidate: Tensor
    """int64 ``[N]``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilteredRows(RandomRows):
    """Rows that draw from the most likely part of their distribution."""

    top_k: Tensor
    """int64 ``[N, 1]``; ``vocab_limit`` keeps all."""
    top_p: Tensor
    """float64 ``[N, 1]``; inf keeps all."""
    min_p: Tensor
    """float32 ``[N, 1]``; 0 keeps all."""
    candidates: int
    """How many of the most likely tokens to look at first, at most ``vocab_limit``. Changes speed, not results."""
    needs_mass: bool
    """Whether some row has top_p without top_k."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBias:
    """Additions to single logits."""

    rows: Tensor
    """int64 ``[B]``."""
    ids: Tensor
    """int64 ``[B]``; no (row, id) twice."""
    values: Tensor
    """float32 ``[B]``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBans:
    """Ids that a row cannot sample before some position."""

    rows: Tensor
    """int64 ``[B]``."""
    ids: Tensor
    """int64 ``[B]``; no (row, id) twice."""
    until: Tensor
    """int64 ``[B]``: first position where the id may stand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedTokens:
    """Rows that can only sample some ids."""

    rows: Tensor
    """int64 ``[A]``."""
    mask: Tensor
    """bool ``[A, vocab_limit]``: True may be sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Rows with penalties."""

    rows: Tensor
    """int64 ``[Q]``."""
    slots: Tensor
    """int64 ``[Q]``: their slots in `TokenCounts`."""
    presence: Tensor
    """float32 ``[Q, 1]``, as the other two."""
    frequency: Tensor
    repetition: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """How each of R rows chooses its token; rows in neither ``random`` nor ``filtered`` are greedy.

    What no row uses is None. Every id in here is below ``vocab_limit``.
    """

    vocab_limit: int
    """Ids from here on are padding of the head and are never sampled."""
    random: RandomRows | None = None
    filtered: FilteredRows | None = None
    bias: TokenBias | None = None
    allowed: AllowedTokens | None = None
    bans: TokenBans | None = None
    penalties: Penalties | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """Outcome of R rows."""

    ids: Tensor
    """int64 ``[R]``; 0 where one of the flags below is False."""
    finite: Tensor
    """bool ``[R]``: whether all of the row's raw logits are finite."""
    possible: Tensor
    """bool ``[R]``: whether the masks leave any token."""


def sample(logits: Tensor, batch: SamplingBatch, positions: Tensor, counts: TokenCounts) -> Sampled:
    """Chooses the next token of each row.

    Order: logit bias, allowed ids, bans, penalties; the greedy choice is the largest of what results (lowest id among
    equals). Others subtract the maximum, divide by the temperature, keep the ``top_k`` most likely, of these the
    smallest set that reaches ``top_p`` of their mass, of these the ones that reach ``min_p`` of the most likely, and
    invert the cumulative distribution at one uniform draw of (seed, candidate, position). Unfiltered rows accumulate
    in order of ids, filtered ones by (logit descending, id ascending).

    Args:
        logits: float32 ``[R, V]``, not changed.
        positions: int64 ``[R]``: where the token will stand in its row.
        counts: what penalised rows have seen.
    """
    finite = logits.isfinite().all(-1)
    scores = logits[:, : batch.vocab_limit]
    if not finite.all():
        scores = scores.where(finite[:, None], 0.0)
    scores = _adjust(scores, batch, positions, counts)
    ids = scores.argmax(-1)
    possible = scores.gather(-1, ids[:, None])[:, 0] > -torch.inf
    if not possible.all():
        scores = scores.where(possible[:, None], 0.0)
    if batch.random is not None:
        ids[batch.random.rows] = _draw(scores, batch.random, positions)
    if batch.filtered is not None:
        ids[batch.filtered.rows] = _draw_filtered(scores, batch.filtered, positions)
    return Sampled(ids.where(finite & possible, 0), finite, possible)


def _adjust(scores: Tensor, batch: SamplingBatch, positions: Tensor, counts: TokenCounts) -> Tensor:
    if batch.bias is None and batch.allowed is None and batch.bans is None and batch.penalties is None:
        return scores
    scores = scores.clone()
    if (bias := batch.bias) is not None:
        scores[bias.rows, bias.ids] += bias.values
    if (allowed := batch.allowed) is not None:
        scores[allowed.rows] = scores[allowed.rows].masked_fill(~allowed.mask, -torch.inf)
    if (bans := batch.bans) is not None:
        kept = scores[bans.rows, bans.ids]
        scores[bans.rows, bans.ids] = kept.masked_fill(positions[bans.rows] < bans.until, -torch.inf)
    if (penalties := batch.penalties) is not None:
        scores[penalties.rows] = penalise(
            scores[penalties.rows],
            counts.in_prompt[penalties.slots, : batch.vocab_limit],
            counts.output[penalties.slots, : batch.vocab_limit],
            penalties.presence,
            penalties.frequency,
            penalties.repetition,
        )
    return scores


def _scaled(scores: Tensor, rows: RandomRows) -> Tensor:
    """Logits relative to the largest, over temperature: float32 ``[N, vocab_limit]``, at most 0."""
    chosen = scores[rows.rows]
    return chosen.sub_(chosen.amax(-1, keepdim=True)).div_(rows.temperature)


def _uniforms(rows: RandomRows, positions: Tensor) -> Tensor:
    """float64 ``[N, 1]`` in [0, 1)."""
    return uniforms(rows.seed, rows.candidate, positions[rows.rows])[:, None]


def _draw(scores: Tensor, rows: RandomRows, positions: Tensor) -> Tensor:
    cumulative = _scaled(scores, rows).exp_().cumsum(-1, dtype=torch.float64)
    target = _uniforms(rows, positions) * cumulative[:, -1:]
    # The first id whose cumulative sum exceeds the target: its own probability cannot be zero.
    return torch.searchsorted(cumulative, target, right=True)[:, 0]


def _draw_filtered(scores: Tensor, rows: FilteredRows, positions: Tensor) -> Tensor:
    scaled = _scaled(scores, rows)
    mass = scaled.exp().cumsum(-1, dtype=torch.float64)[:, -1:] if rows.needs_mass else torch.ones_like(rows.top_p)
    columns = (rows.top_k, rows.top_p, rows.min_p, mass, _uniforms(rows, positions))
    ids, fits = _draw_candidates(scaled, columns, rows.candidates)
    if not fits.all():
        rest = (~fits).nonzero()[:, 0]
        ids[rest], _ = _draw_candidates(scaled[rest], [column[rest] for column in columns], scaled.shape[1])
    return ids


def _draw_candidates(scaled: Tensor, columns: Sequence[Tensor], candidates: int) -> tuple[Tensor, Tensor]:
    """Draws among each row's most likely ``candidates``.

    Args:
        scaled: float32 ``[N, vocab_limit]``.
        columns: ``[N, 1]`` each: top_k, top_p, min_p, the sum of ``exp(scaled)`` (read where there is a top_p and no
            top_k), the uniform draw.

    Returns:
        Ids ``[N]``, and bool ``[N]``: whether the row keeps no token beyond the candidates, so that its id is right.
    """
    top_k, top_p, min_p, mass, uniform = columns
    vocab_limit = scaled.shape[1]
    values, ids = ranked(scaled, candidates)
    weights = values.exp()
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    before = torch.nn.functional.pad(cumulative[:, :-1], (1, 0))
    limited = top_k < vocab_limit
    total = torch.where(limited, cumulative.gather(-1, top_k.clamp(max=candidates) - 1), mass)
    place = torch.arange(candidates, device=scaled.device)
    # Each filter keeps a prefix of the order, and all keep its first token.
    kept = ((place < top_k) & (before < top_p * total) & (weights >= min_p)).sum(-1, keepdim=True)
    fits = (candidates == vocab_limit) | ((kept < candidates) & ((top_k <= candidates) | ~limited))
    target = uniform * cumulative.gather(-1, kept - 1)
    drawn = (cumulative <= target).sum(-1, keepdim=True)
    return ids.gather(-1, drawn)[:, 0], fits[:, 0]
