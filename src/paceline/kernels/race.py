"""A race among tokens: each draws a waiting time, the first to arrive is sampled."""

import torch
from torch import Tensor

_MULTIPLIERS = (0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32)


def _mix(words: Tensor) -> Tensor:
    """The finaliser of MurmurHash3 (Appleby, 2011), which maps 32-bit words one to one; int32, in place."""
    words ^= (words >> 16) & 0xFFFF
    words *= _MULTIPLIERS[0]
    words ^= (words >> 13) & 0x7FFFF
    words *= _MULTIPLIERS[1]
    words ^= (words >> 16) & 0xFFFF
    return words


def log_waiting_times(keys: Tensor, ids: Tensor) -> Tensor:
    """Logarithm of an exponential variate of rate 1 for each (key, id): float32 ``[N, n]``.

    A pure function of key and id. The arrival that minimises ``log_waiting_time - logit`` is a token drawn from
    ``softmax(logits)`` (the Gumbel-max trick; Gumbel, 1954). Unlike the inversion of a cumulative sum, rounding of the
    logits changes the outcome only where two arrivals are as close as the rounding.

    Args:
        keys: int32 ``[N, 2]``: 64 random bits a row.
        ids: int64 or int32 ``[n]`` or ``[N, n]``.
    """
    words = _mix(ids.to(torch.int32) + keys[:, :1])
    words = _mix(words.bitwise_xor_(keys[:, 1:])).bitwise_and_(0x7FFFFFFF)
    # In (0, 1], finest near 0, where the early arrivals are; at 1 a token never arrives.
    uniform = words.to(torch.float32).add_(0.5).mul_(2.0**-31)
    return uniform.neg_().log1p_().neg_().log_()
