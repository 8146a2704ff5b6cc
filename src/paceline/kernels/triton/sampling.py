"""The race among tokens (`kernels/race.py`) and the greedy choice, in one pass over the logits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096
"""Logits that one program looks at."""


@triton.jit
def _mix(words):
    """The finaliser of MurmurHash3, as in `kernels/race.py`; uint32."""
    words = (words ^ (words >> 16)) * 0x85EBCA6B
    words = (words ^ (words >> 13)) * 0xC2B2AE35
    return words ^ (words >> 16)


@triton.jit
def _log_waiting_times(key0, key1, ids):
    words = _mix(_mix(ids.to(tl.uint32) + key0) ^ key1) & 0x7FFFFFFF
    uniform = (words.to(tl.float32) + 0.5) * (1.0 / 2147483648.0)
    # log1p(-u), exact where u is small: the rounding of 1 - u is divided out again.
    rest = 1.0 - uniform
    lost = tl.where(rest == 1.0, 1.0, uniform / (1.0 - rest))
    log1p = tl.where(rest == 1.0, -uniform, tl.where(rest > 0.0, tl.log(rest) * lost, float("-inf")))
    return tl.log(-log1p)


@triton.jit
def _heats(
    logits,
    stride,
    temperature,
    seed,
    candidate,
    position,
    scores,
    winners,
    finite,
    vocab_limit,
    width,
    chunks,
    CHUNK: tl.constexpr,
):
    """The first of each chunk: score, id, and whether all of its logits are finite."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row.to(tl.int64) * stride + ids, mask=ids < width, other=0.0).to(tl.float32)
    infinite = tl.abs(values) == float("inf")
    good = tl.min(((values == values) & (infinite == 0)).to(tl.int32), 0)
    warmth = tl.load(temperature + row)
    if warmth > 0.0:
        seed_bits = tl.load(seed + row)
        c0 = tl.load(position + row).to(tl.uint32)
        c1 = tl.load(candidate + row).to(tl.uint32)
        zero = c0 * 0
        key0, key1, _, _ = tl.philox_impl(
            c0, c1, zero, zero, seed_bits.to(tl.uint32), (seed_bits >> 32).to(tl.uint32), 10
        )
        values = values / warmth - _log_waiting_times(key0, key1, ids)
    values = tl.where((ids < vocab_limit) & (values == values), values, float("-inf"))
    score, place = tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)
    out = row * chunks + chunk
    tl.store(scores + out, score)
    tl.store(winners + out, chunk * CHUNK + place)
    tl.store(finite + out, good)


@triton.jit
def _final(scores, winners, finite, ids, good, chunks, CHUNKS: tl.constexpr):
    row = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS)
    inside = chunk < chunks
    best = tl.load(scores + row * chunks + chunk, mask=inside, other=float("-inf"))
    _, place = tl.max(best, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(ids + row, tl.load(winners + row * chunks + place))
    tl.store(good + row, tl.min(tl.load(finite + row * chunks + chunk, mask=inside, other=1), 0))


def race(
    logits: Tensor, temperature: Tensor, seed: Tensor, candidate: Tensor, position: Tensor, vocab_limit: int
) -> tuple[Tensor, Tensor]:
    """Next token of rows that filter nothing: the same as `kernels.sampling.sample`, up to rounding.

    Args:
        logits: ``[R, V]``, any float dtype; rows contiguous.
        temperature: float32 ``[R]``; 0 is greedy, and the lowest id wins among equals.
        seed: int64 ``[R]``.
        candidate, position: int32 or int64 ``[R]``.
        vocab_limit: ids from here on are padding of the head and are never sampled.

    Returns:
        ids int32 ``[R]`` and int32 ``[R]``: 1 where all logits of the row are finite; ids of other rows mean nothing.
    """
    rows, width = logits.shape
    chunks = triton.cdiv(width, CHUNK)
    scores = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    winners, finite = (torch.empty(rows, chunks, dtype=torch.int32, device=logits.device) for _ in range(2))
    ids, good = (torch.empty(rows, dtype=torch.int32, device=logits.device) for _ in range(2))
    _heats[(rows, chunks)](
        logits,
        logits.stride(0),
        temperature,
        seed,
        candidate,
        position,
        scores,
        winners,
        finite,
        vocab_limit,
        width,
        chunks,
        CHUNK=CHUNK,
        num_warps=4,
    )
    _final[(rows,)](scores, winners, finite, ids, good, chunks, CHUNKS=triton.next_power_of_2(chunks), num_warps=1)
    return ids, good
