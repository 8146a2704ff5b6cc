"""Chooses the next token of every row in one launch; rows that filter are finished by `filtering`.

The reference is `paceline.kernels.sampling`. Rows are independent: the work of a row is split the same way in every
batch, and partial results meet in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.triton.filtering import choose
from paceline.kernels.triton.scores import GROUP, LOWEST, adjusted, log_waiting_times, note_sampled, race_keys
from paceline.kernels.triton.seats import LONGS, NOTES, TEMPERATURE, TOP_K, WORDS, SeatTable

CHUNK = 2048
"""Logits that one program looks at."""

FINE, NOT_FINITE, NOTHING_POSSIBLE = map(tl.constexpr, (0, 1, 2))
"""What became of a row: it has a token; its logits are not finite; none of its tokens may be sampled."""


@triton.jit(do_not_specialize_on_alignment=["seats", "positions"])
def _race(
    logits,
    stride,
    seats,
    positions,
    longs,
    floats,
    ints,
    scores,
    tops,
    winners,
    finite,
    maxima,
    counters,
    last_token,
    ids,
    status,
    limit,
    width,
    chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
    FILTERS: tl.constexpr,
):
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row.to(tl.int64) * stride + tokens, mask=tokens < width, other=0.0).to(tl.float32)
    seat = tl.load(seats + row).to(tl.int64)
    position = tl.load(positions + row)
    temperature = tl.load(floats + seat * WORDS + TEMPERATURE)
    filters = FILTERS and tl.load(ints + seat * WORDS + TOP_K) > 0
    good = tl.min((tl.abs(values) < float("inf")).to(tl.int32), 0)
    values = adjusted(values, tokens, tokens < limit, position, longs, floats, ints, seat)
    values = tl.where((tokens < limit) & (values == values), values, float("-inf"))
    top = tl.max(values, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    out = row * chunks + chunk
    if filters:
        group = chunk * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
        tl.store(
            maxima + row * chunks * (CHUNK // GROUP) + group, tl.max(tl.reshape(values, (CHUNK // GROUP, GROUP)), 1)
        )
        tl.store(scores + out, tl.sum(tl.exp(tl.math.div_rn(values - base, temperature)), 0))
    else:
        score = top
        if temperature > 0.0:
            key0, key1 = race_keys(longs, ints, seat, position)
            times = log_waiting_times(key0, key1, tokens)
            arrivals = tl.maximum(tl.math.div_rn(values - base, temperature) - times, LOWEST)
            values = tl.where(values == float("-inf"), values, arrivals)
            score = tl.max(values, 0)
        # Cheaper than a search for the largest together with its place.
        place = tl.min(tl.where(values == score, tokens, width), 0)
        tl.store(scores + out, score)
        tl.store(winners + out, place)
    tl.store(tops + out, top)
    tl.store(finite + out, good)
    # The program that comes last puts the row's chunks together.
    tl.debug_barrier()
    arrived = tl.atomic_add(counters + row, 1, sem="acq_rel")
    if arrived == chunks - 1:
        tl.store(counters + row, 0)
        lane = tl.arange(0, CHUNKS)
        inside = lane < chunks
        part = row * chunks + lane
        peaks = tl.load(tops + part, mask=inside, other=float("-inf"), cache_modifier=".cg")
        peak = tl.max(peaks, 0)
        fine = tl.min(tl.load(finite + part, mask=inside, other=1, cache_modifier=".cg"), 0)
        state = tl.where(fine == 0, NOT_FINITE, tl.where(peak == float("-inf"), NOTHING_POSSIBLE, FINE))
        chosen = 0
        if not filters:
            totals = tl.load(scores + part, mask=inside, other=float("-inf"), cache_modifier=".cg")
            if temperature > 0.0:  # scores are relative to the largest logit of their chunk
                totals += tl.where(peaks == float("-inf"), 0.0, tl.math.div_rn(peaks - peak, temperature))
            _, place = tl.max(totals, 0, return_indices=True, return_indices_tie_break_left=True)
            if state == FINE:
                chosen = tl.load(winners + row * chunks + place, cache_modifier=".cg")
                note_sampled(tl.load(longs + seat * LONGS + NOTES), chosen)
        tl.store(ids + row, chosen)
        tl.store(last_token + seat, chosen)
        tl.store(status + row, state)


def sample(
    logits: Tensor, seats: Tensor, positions: Tensor, table: SeatTable, vocab_limit: int, *, filters: bool
) -> tuple[Tensor, Tensor]:
    """Next token of each row: what `kernels.sampling.sample` gives, up to the rounding of logarithms and sums.

    Sampled tokens are counted in the notes of their rows. Waits for nothing, and its launches depend on shapes and on
    ``filters`` alone, so that a CUDA graph can hold them.

    Args:
        logits: ``[R, V]``, any float dtype; rows contiguous.
        seats: int32 ``[R]``: where the row's parameters are in ``table``. Seats with notes must be distinct.
        positions: int32 ``[R]``: where the token will stand.
        vocab_limit: ids from here on are padding of the head and are never sampled.
        filters: whether some row has top_k, top_p or min_p: these need a second launch.

    Returns:
        ids and status, int32 ``[R]``; the id is 0 where the status is not ``FINE``. ``table.last_token`` gets the ids
        too.
    """
    rows, width = logits.shape
    assert rows <= len(table.counters), "more rows than seats"
    chunks = triton.cdiv(width, CHUNK)
    scores, tops = (torch.empty(rows, chunks, dtype=torch.float32, device=logits.device) for _ in range(2))
    winners, finite = (torch.empty(rows, chunks, dtype=torch.int32, device=logits.device) for _ in range(2))
    groups = chunks * (CHUNK // GROUP.value)
    maxima = torch.empty(rows, groups if filters else 0, dtype=torch.float32, device=logits.device)
    ids, status = (torch.empty(rows, dtype=torch.int32, device=logits.device) for _ in range(2))
    _race[(rows, chunks)](
        logits,
        logits.stride(0),
        seats,
        positions,
        table.longs,
        table.floats,
        table.ints,
        scores,
        tops,
        winners,
        finite,
        maxima,
        table.counters,
        table.last_token,
        ids,
        status,
        vocab_limit,
        width,
        chunks,
        CHUNK=CHUNK,
        CHUNKS=triton.next_power_of_2(chunks),
        GROUP=GROUP.value,
        FILTERS=filters,
        num_warps=4,
    )
    if filters:
        choose(logits, seats, positions, table, vocab_limit, tops, scores, maxima, ids, status)
    return ids, status
