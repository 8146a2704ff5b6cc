"""Chooses each row's next token from its logits. Plain torch, on any device: the reference for faster versions.

Rows are independent: a row's token is the same bit for bit alone, in any batch and in any order. So nothing here sums
over a whole row at once: torch splits such a sum by the number of rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.penalties import SeenTokens, penalise
from paceline.kernels.philox import stream_keys
from paceline.kernels.race import log_waiting_times
from paceline.kernels.ranking import candidates

CANDIDATES = (64, 1024)
"""Most likely tokens among which filtered rows are drawn: first few, then more for rows that keep more, at last all."""

BLOCK = 256
"""Tokens whose probabilities are summed at once."""


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
    """Of all R rows; neutral for those without."""

    presence: Tensor
    """float32 ``[R]``, as the other two."""
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


def sample(logits: Tensor, batch: SamplingBatch, positions: Tensor, seen: SeenTokens | None = None) -> Sampled:
    """Chooses the next token of each row.

    Order: logit bias, allowed ids, bans, penalties; the greedy choice is the largest of what results (lowest id among
    equals). Others subtract the maximum, divide by the temperature, keep the ``top_k`` most likely, of these the
    smallest set that reaches ``top_p`` of their mass, of these the ones that reach ``min_p`` of the most likely, and
    let what is left race: token i arrives at a time drawn from (seed, candidate, position, i), and the first is taken.

    Args:
        logits: float32 ``[R, V]``, not changed.
        positions: int64 ``[R]``: where the token will stand in its row.
        seen: tokens of penalised rows; None when ``batch.penalties`` is.
    """
    finite = logits.amax(-1).isfinite() & logits.amin(-1).isfinite()
    if not finite.all():
        logits = logits.where(finite[:, None], 0.0)
    scores = _adjust(logits, batch, positions, seen)[:, : batch.vocab_limit]
    ids = scores.argmax(-1)
    possible = scores.gather(-1, ids[:, None])[:, 0] > -torch.inf
    if not possible.all():
        scores = scores.where(possible[:, None], 0.0)
    if batch.random is not None:
        ids[batch.random.rows] = _draw(scores, batch.random, positions)
    if batch.filtered is not None:
        ids[batch.filtered.rows] = _draw_filtered(scores, batch.filtered, positions)
    return Sampled(ids.where(finite & possible, 0), finite, possible)


def _adjust(logits: Tensor, batch: SamplingBatch, positions: Tensor, seen: SeenTokens | None) -> Tensor:
    if batch.bias is None and batch.allowed is None and batch.bans is None and batch.penalties is None:
        return logits
    scores = logits.clone()
    if (bias := batch.bias) is not None:
        scores[bias.rows, bias.ids] += bias.values
    if (allowed := batch.allowed) is not None:
        tokens = scores[:, : batch.vocab_limit]
        tokens[allowed.rows] = tokens[allowed.rows].masked_fill(~allowed.mask, -torch.inf)
    if (bans := batch.bans) is not None:
        kept = scores[bans.rows, bans.ids]
        scores[bans.rows, bans.ids] = kept.masked_fill(positions[bans.rows] < bans.until, -torch.inf)
    if (penalties := batch.penalties) is not None:
        assert seen is not None, "penalties need the tokens that were seen"
        rows = seen.rows
        scores[rows, seen.ids] = penalise(
            scores[rows, seen.ids],
            seen.in_prompt,
            seen.output_count,
            penalties.presence[rows],
            penalties.frequency[rows],
            penalties.repetition[rows],
        )
    return scores


def _scaled(scores: Tensor, rows: RandomRows) -> Tensor:
    """Logits relative to the largest, over temperature: float32 ``[N, vocab_limit]``, at most 0."""
    chosen = scores[rows.rows]
    return chosen.sub_(chosen.amax(-1, keepdim=True)).div_(rows.temperature)


def _keys(rows: RandomRows, positions: Tensor) -> Tensor:
    return stream_keys(rows.seed, rows.candidate, positions[rows.rows])


def _block_sums(weights: Tensor) -> Tensor:
    """Sums of each ``BLOCK`` neighbours of ``[N, V]``, the last possibly of fewer: float64 ``[N, ceil(V / BLOCK)]``."""
    whole = weights.shape[1] // BLOCK * BLOCK
    sums = weights[:, :whole].unflatten(1, (-1, BLOCK)).sum(-1)
    if whole < weights.shape[1]:
        sums = torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True)], 1)
    return sums.double()


def _draw(scores: Tensor, rows: RandomRows, positions: Tensor) -> Tensor:
    tokens = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device)
    scaled, keys = _scaled(scores, rows), _keys(rows, positions)
    # One row at a time: its temporaries stay in the processor's cache.
    return torch.cat(
        [
            (row - log_waiting_times(key, tokens)).argmax(-1)
            for row, key in zip(scaled.split(1), keys.split(1), strict=True)
        ]
    )


def _draw_filtered(scores: Tensor, rows: FilteredRows, positions: Tensor) -> Tensor:
    scaled = _scaled(scores, rows)
    mass = _block_sums(scaled.exp()).cumsum(-1)[:, -1:] if rows.needs_mass else torch.ones_like(rows.top_p)
    columns = [rows.top_k, rows.top_p, rows.min_p, mass, _keys(rows, positions)]
    ids = torch.zeros_like(rows.rows)
    rest = torch.arange(len(ids), device=ids.device)
    size = scaled.shape[1]
    for count in (*(count for count in CANDIDATES if count < size), size):
        ids[rest], fits = _draw_candidates(scaled, columns, count)
        if fits.all():
            break
        rest, scaled, columns = rest[~fits], scaled[~fits], [column[~fits] for column in columns]
    return ids


def _draw_candidates(scaled: Tensor, columns: Sequence[Tensor], count: int) -> tuple[Tensor, Tensor]:
    """Draws among each row's most likely ``count`` tokens.

    Args:
        scaled: float32 ``[N, vocab_limit]``.
        columns: top_k, top_p, min_p, the sum of ``exp(scaled)`` (read where there is a top_p and no top_k), each
            ``[N, 1]``, and the keys of the race, ``[N, 2]``.

    Returns:
        Ids ``[N]``, and bool ``[N]``: whether the row keeps no token beyond the candidates, so that its id is right.
    """
    top_k, top_p, min_p, mass, keys = columns
    values, ids, certain = candidates(scaled, count)
    weights = values.exp()
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    before = torch.nn.functional.pad(cumulative[:, :-1], (1, 0))
    limited = top_k < scaled.shape[1]
    total = torch.where(limited, cumulative.gather(-1, top_k.clamp(max=count) - 1), mass)
    place = torch.arange(count, device=scaled.device)
    # Each filter keeps a prefix of the order, and all keep its first token.
    kept = ((place < top_k) & (before < top_p * total) & (weights >= min_p)).sum(-1, keepdim=True)
    fits = (kept <= certain) & ((top_k <= count) | ~limited)
    arrivals = (values - log_waiting_times(keys, ids)).where(place < kept, -torch.inf)
    return ids.gather(-1, arrivals.argmax(-1, keepdim=True))[:, 0], fits[:, 0]
