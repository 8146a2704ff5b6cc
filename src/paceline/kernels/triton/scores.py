"""Parts that the sampling kernels share: a row's scores, its random numbers, and the note of what it sampled."""

import triton
import triton.language as tl

from paceline.kernels.triton.seats import (
    BIAS,
    CANDIDATE,
    FREQUENCY,
    LONGS,
    NOTES,
    PRESENCE,
    REPETITION,
    SEED,
    UNTIL,
    WORDS,
)
from paceline.kernels.triton.token_notes import BANNED, COUNT_SHIFT, IN_PROMPT, ONCE

GROUP = tl.constexpr(64)
"""Neighbouring tokens whose largest score is kept for rows that filter."""

LOWEST = tl.constexpr(-3e38)
"""A token that never arrives still comes before one that may not be sampled."""


@triton.jit
def adjusted(values, tokens, inside, position, longs, floats, ints, seat):
    """Logits after bias, masks, bans and penalties; float32."""
    bias = tl.load(longs + seat * LONGS + BIAS)
    if bias != 0:
        additions = tl.multiple_of(bias.to(tl.pointer_type(tl.float32)), 16)
        values += tl.load(additions + tokens, mask=inside, other=0.0)
    notes = tl.load(longs + seat * LONGS + NOTES)
    if notes != 0:
        known = tl.multiple_of(notes.to(tl.pointer_type(tl.int32)), 16)
        note = tl.load(known + tokens, mask=inside, other=0)
        banned = ((note & BANNED) != 0) & (position < tl.load(ints + seat * WORDS + UNTIL))
        values = tl.where(banned, float("-inf"), values)
        repetition = tl.load(floats + seat * WORDS + REPETITION)
        count = (note >> COUNT_SHIFT).to(tl.float32)
        scaled = tl.where(values > 0.0, tl.math.div_rn(values, repetition), values * repetition)
        values = tl.where((count > 0.0) | ((note & IN_PROMPT) != 0), scaled, values)
        values -= tl.where(count > 0.0, tl.load(floats + seat * WORDS + PRESENCE), 0.0)
        values -= tl.load(floats + seat * WORDS + FREQUENCY) * count
    return values


@triton.jit
def note_sampled(notes, token):
    """Counts a token; ``notes`` is the address of the row's notes, or 0."""
    if notes != 0:
        tl.atomic_add(notes.to(tl.pointer_type(tl.int32)) + token, ONCE)


@triton.jit
def race_keys(longs, ints, seat, position):
    """64 random bits of (seed, candidate, position), as `kernels/philox.py` draws them."""
    seed = tl.load(longs + seat * LONGS + SEED)
    c0 = position.to(tl.uint32)
    c1 = tl.load(ints + seat * WORDS + CANDIDATE).to(tl.uint32)
    zero = c0 * 0
    key0, key1, _, _ = tl.philox_impl(c0, c1, zero, zero, seed.to(tl.uint32), (seed >> 32).to(tl.uint32), 10)
    return key0, key1


@triton.jit
def _mix(words):
    """The finaliser of MurmurHash3, as in `kernels/race.py`; uint32."""
    words = (words ^ (words >> 16)) * 0x85EBCA6B
    words = (words ^ (words >> 13)) * 0xC2B2AE35
    return words ^ (words >> 16)


@triton.jit
def log_waiting_times(key0, key1, tokens):
    """As `kernels/race.py` defines them."""
    words = _mix(_mix(tokens.to(tl.uint32) + key0) ^ key1) & 0x7FFFFFFF
    uniform = (words.to(tl.float32) + 0.5) * (1.0 / 2147483648.0)
    # log1p(-u), exact where u is small: the rounding of 1 - u is divided out again.
    rest = 1.0 - uniform
    lost = tl.where(rest == 1.0, 1.0, uniform / (1.0 - rest))
    log1p = tl.where(rest == 1.0, -uniform, tl.where(rest > 0.0, tl.log(rest) * lost, float("-inf")))
    return tl.log(-log1p)
