"""The draw among a row's most likely tokens (top_k, top_p, min_p) without sorting the vocabulary.

Order and result are those of `paceline.kernels.sampling`: by (scaled score descending, id ascending) a prefix is kept,
and its tokens race. A key is the distance to the row's largest score over the temperature: the bits of a float that is
not negative ascend as it does, so keys are compared as integers, and smaller is more likely.

1. The first launch left the largest score of each group of tokens. The groups whose best is good enough are picked: the
   k best tokens lie in the k groups with the best maxima.
2. Bisection over the keys of the picked groups finds where the kept prefix ends. It reads the groups while many keys
   are in question, then works on the few that are left.
3. A last pass lets the kept tokens race; of equals at the end the lowest ids are kept.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.triton.scores import GROUP, LOWEST, adjusted, log_waiting_times, note_sampled, race_keys
from paceline.kernels.triton.seats import LONGS, MIN_P, NOTES, TEMPERATURE, TOP_K, TOP_P, WORDS, SeatTable

TILE = tl.constexpr(32)
"""Groups read at once."""

CANDIDATES = tl.constexpr(1024)
"""Keys in question that are held at once."""

FIRST_GROUPS = tl.constexpr(32)
"""Groups picked at first for a row with top_p alone; each time they hold too little mass, eight times as many."""

NEVER = tl.constexpr(0x7F800000)
"""Key of a token that may not be sampled, infinitely far."""

FAR = tl.constexpr(0x42D00000)
"""Key of distance 104: beyond, probabilities are 0."""

COARSE = tl.constexpr(1 << 16)
"""Picking groups looks at the 15 high bits of a key alone, which are multiples of this."""


@triton.jit
def _weights(keys):
    """Probability relative to the most likely token."""
    return tl.exp(-keys.to(tl.float32, bitcast=True))


@triton.jit
def _keys(values, peak, temperature):
    return tl.abs(tl.math.div_rn(values - peak, temperature)).to(tl.int32, bitcast=True)


@triton.jit
def _read(source, first):
    """Keys and ids of picked groups ``first`` to ``first + TILE``, by id."""
    logits, picked, count, limit, position, longs, floats, ints, seat, peak, temperature = source
    slot = first + tl.arange(0, TILE)
    group = tl.load(picked + slot, mask=slot < count, other=limit)
    tokens = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = tokens < limit
    values = tl.load(logits + tokens, mask=inside, other=0.0).to(tl.float32)
    values = adjusted(values, tokens, inside, position, longs, floats, ints, seat)
    keys = tl.where(inside & (values == values), _keys(values, peak, temperature), NEVER)
    return tl.reshape(keys, (TILE * GROUP,)), tl.reshape(tokens, (TILE * GROUP,))


@triton.jit
def _below(source, low, bound):
    """Number and mass of keys from ``low`` to before ``bound``."""
    counts = tl.zeros((TILE * GROUP,), tl.int32)
    masses = tl.zeros((TILE * GROUP,), tl.float32)
    first = tl.full((), 0, tl.int32)
    while first < source[2]:
        keys, _tokens = _read(source, first)
        inside = (keys >= low) & (keys < bound)
        counts += inside.to(tl.int32)
        masses += tl.where(inside, _weights(keys), 0.0)
        first += TILE
    return tl.sum(counts, 0), tl.sum(masses.to(tl.float64), 0)


@triton.jit
def _last_kept(source, candidates, end, open, goal, BY_MASS: tl.constexpr):
    """The largest key before ``end`` that begins before so many tokens, or (BY_MASS) before so much mass, as ``goal``.

    At most ``open`` keys are before ``end``.

    Returns:
        The key, the number and mass of those below it, and the number of those equal to it.
    """
    low = tl.full((), 0, tl.int32)
    high = end
    count = tl.full((), 0, tl.int32)
    mass = tl.full((), 0.0, tl.float64)
    while (open > CANDIDATES) & (high - low > 1):
        middle = low + ((high - low) >> 1)
        more, weight = _below(source, low, middle)
        if mass + weight < goal if BY_MASS else count + more < goal:
            low = middle
            count += more
            mass += weight
            open -= more
        else:
            high = middle
            open = more
    single = high - low == 1
    tl.debug_barrier()
    held = tl.full((), 0, tl.int32)
    first = tl.full((), 0, tl.int32)
    while first < source[2]:
        keys, _tokens = _read(source, first)
        inside = (keys >= low) & (keys < high)
        place = held + tl.cumsum(inside.to(tl.int32), 0) - 1
        tl.store(candidates + place, keys, mask=inside & (place < CANDIDATES))
        held += tl.sum(inside.to(tl.int32), 0)
        first += TILE
    tl.debug_barrier()
    lane = tl.arange(0, CANDIDATES)
    keys = tl.load(candidates + lane, mask=lane < held, other=NEVER)
    weights = tl.where(lane < held, _weights(keys), 0.0).to(tl.float64)
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        if BY_MASS:
            kept = mass + tl.sum(tl.where(keys < middle, weights, 0.0), 0) < goal
        else:
            kept = count + tl.sum((keys < middle).to(tl.int32), 0) < goal
        low = tl.where(kept, middle, low)
        high = tl.where(kept, high, middle)
    equal = tl.where(single, held, tl.sum((keys == low).to(tl.int32), 0))
    count += tl.sum((keys < low).to(tl.int32), 0)
    mass += tl.sum(tl.where(keys < low, weights, 0.0), 0)
    return low, count, mass, equal


@triton.jit
def _race_kept(source, last, equals, all_equals, min_p, key0, key1):
    """The first to arrive of all keys before ``last`` and of the first ``equals`` (or all) that equal it."""
    lane = tl.arange(0, TILE * GROUP)
    best = tl.full((TILE * GROUP,), float("-inf"), tl.float32)
    chosen = tl.zeros((TILE * GROUP,), tl.int32)
    seen = tl.full((), 0, tl.int32)
    first = tl.full((), 0, tl.int32)
    while first < source[2]:
        keys, tokens = _read(source, first)
        kept = keys <= last
        if all_equals == 0:
            equal = (keys == last).to(tl.int32)
            kept = (keys < last) | ((equal != 0) & (seen + tl.cumsum(equal, 0) <= equals))
            seen += tl.sum(equal, 0)
        kept = kept & (_weights(keys) >= min_p)
        arrivals = -keys.to(tl.float32, bitcast=True) - log_waiting_times(key0, key1, tokens)
        arrivals = tl.where(kept, tl.maximum(arrivals, LOWEST), float("-inf"))
        chosen = tl.where(arrivals > best, tokens, chosen)
        best = tl.maximum(arrivals, best)
        first += TILE
    _best, place = tl.max(best, 0, return_indices=True, return_indices_tie_break_left=True)
    return tl.sum(tl.where(lane == place, chosen, 0), 0)


@triton.jit(do_not_specialize_on_alignment=["seats", "positions"])
def _choose(
    logits,
    stride,
    seats,
    positions,
    longs,
    doubles,
    floats,
    ints,
    tops,
    sums,
    maxima,
    picked,
    candidates,
    last_token,
    ids,
    status,
    limit,
    chunks,
    groups,
    CHUNKS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    row = tl.program_id(0)
    seat = tl.load(seats + row).to(tl.int64)
    top_k = tl.load(ints + seat * WORDS + TOP_K)
    if (top_k == 0) | (tl.load(status + row) != 0):
        return
    position = tl.load(positions + row)
    temperature = tl.load(floats + seat * WORDS + TEMPERATURE)
    min_p = tl.load(floats + seat * WORDS + MIN_P)
    top_p = tl.load(doubles + seat * LONGS + TOP_P)
    limited = top_k < limit
    nucleus = top_p < float("inf")
    picked += row * groups
    candidates += row * CANDIDATES

    lane = tl.arange(0, CHUNKS)
    peaks = tl.load(tops + row * chunks + lane, mask=lane < chunks, other=float("-inf"))
    peak = tl.max(peaks, 0)
    parts = tl.load(sums + row * chunks + lane, mask=lane < chunks, other=0.0)
    parts = parts * tl.exp(tl.math.div_rn(peaks - peak, temperature))
    target = top_p * tl.sum(parts.to(tl.float64), 0)
    target = tl.where(limited, float("inf"), target)

    group = tl.arange(0, GROUPS)
    best = tl.load(maxima + row * groups + group, mask=group < groups, other=float("-inf"))
    keys = _keys(best, peak, temperature)
    # Below the floor no token matters; where top_p follows top_k, all of the k count in the mass.
    floor = tl.where(limited & nucleus, 0.0, min_p)
    want = tl.where(limited, top_k, tl.where(nucleus, FIRST_GROUPS, groups))
    base = logits + row.to(tl.int64) * stride
    count = tl.full((), 0, tl.int32)
    number = tl.full((), 0, tl.int32)
    mass = tl.full((), 0.0, tl.float64)
    end = tl.full((), 0, tl.int32)
    enough = end != 0
    while enough == 0:
        end = 0
        if want < groups:
            for bit in tl.static_range(15):
                trial = end | ((1 << 30) >> bit)
                end = tl.where(tl.sum((keys < trial).to(tl.int32), 0) < want, trial, end)
            end = tl.minimum(end + COARSE, NEVER)
        else:
            end = end + NEVER
        picks = (keys < end) & (_weights(keys) >= floor)
        tl.debug_barrier()
        tl.store(picked + tl.cumsum(picks.to(tl.int32), 0) - 1, group, mask=picks)
        tl.debug_barrier()
        count = tl.sum(picks.to(tl.int32), 0)
        source = (base, picked, count, limit, position, longs, floats, ints, seat, peak, temperature)
        number, mass = _below(source, 0, end)
        enough = (end == NEVER) | (_weights(end) < floor) | tl.where(limited, number >= top_k, mass >= target)
        want *= 8

    source = (base, picked, count, limit, position, longs, floats, ints, seat, peak, temperature)
    last = end - 1
    equals = tl.full((), 0, tl.int32)
    equal = tl.full((), 0, tl.int32)
    if limited:
        last, before, mass, equal = _last_kept(source, candidates, end, number, top_k, False)
        equals = tl.minimum(top_k - before, equal)
        target = top_p * (mass + equals * _weights(last).to(tl.float64))
        end = last + 1
        number = before + equal
    if nucleus:
        last, before, mass, equal = _last_kept(source, candidates, tl.minimum(end, FAR), number, target, True)
        # As many equals as begin before the target.
        left = tl.minimum((target - mass) / tl.maximum(_weights(last), 1e-37).to(tl.float64), 1e9)
        begun = left.to(tl.int32)
        begun += (begun < left).to(tl.int32)
        equals = tl.minimum(tl.minimum(top_k - before, equal), begun)
    key0, key1 = race_keys(longs, ints, seat, position)
    chosen = _race_kept(source, last, equals, equals == equal, min_p, key0, key1)
    tl.store(ids + row, chosen)
    tl.store(last_token + seat, chosen)
    note_sampled(tl.load(longs + seat * LONGS + NOTES), chosen)


def choose(
    logits: Tensor,
    seats: Tensor,
    positions: Tensor,
    table: SeatTable,
    vocab_limit: int,
    tops: Tensor,
    sums: Tensor,
    maxima: Tensor,
    ids: Tensor,
    status: Tensor,
) -> None:
    """Writes the ids of rows that filter, where their status is 0. Arguments as for `sampling.sample`, and:

    Args:
        tops: float32 ``[R, chunks]``: largest score of each chunk of the row.
        sums: float32 ``[R, chunks]``: of ``exp((score - top) / temperature)`` over each chunk.
        maxima: float32 ``[R, groups]``: largest score of each group of tokens.
        ids, status: int32 ``[R]``.
    """
    (rows, chunks), groups = tops.shape, maxima.shape[1]
    picked = torch.empty(rows, groups, dtype=torch.int32, device=logits.device)
    candidates = torch.empty(rows, CANDIDATES.value, dtype=torch.int32, device=logits.device)
    _choose[(rows,)](
        logits,
        logits.stride(0),
        seats,
        positions,
        table.longs,
        table.doubles,
        table.floats,
        table.ints,
        tops,
        sums,
        maxima,
        picked,
        candidates,
        table.last_token,
        ids,
        status,
        vocab_limit,
        chunks,
        groups,
        CHUNKS=triton.next_power_of_2(chunks),
        GROUPS=triton.next_power_of_2(groups),
        num_warps=8,
    )
