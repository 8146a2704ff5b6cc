"""Random numbers as a pure function of where they are used, so that batching and preemption cannot change them."""

from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = TypeVar("Words", NDArray[np.int64], Tensor)
"""int64, each element one unsigned 32-bit word."""

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC'11).

    Works elementwise on numpy arrays and on tensors alike. Products of two words wrap around in int64, which keeps
    all 64 bits; the mask after the shift drops the copied sign.

    Args:
        counter: four words.
        key: two words.

    Returns:
        Four words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32) & _MASK ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) & _MASK ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def random_bits(seed: Words, candidate: Words, position: Words) -> tuple[Words, Words]:
    """Two random words for each token that is drawn.

    Args:
        seed: signed 64-bit, any shape; so are the others.
        candidate: 0 to 2**32 - 1.
        position: where the token will stand, 0 to 2**32 - 1.
    """
    zero = seed * 0
    first, second, _, _ = philox4x32((position, candidate, zero, zero), (seed & _MASK, (seed >> 32) & _MASK))
    return first, second


def stream_keys(seed: Tensor, candidate: Tensor, position: Tensor) -> Tensor:
    """64 random bits for each token that is drawn, int32 ``[N, 2]``; arguments int64 ``[N]`` as for `random_bits`."""
    if position.device.type == "cpu":  # about a hundred operations on a few words: far cheaper in numpy
        words = [torch.from_numpy(word) for word in random_bits(seed.numpy(), candidate.numpy(), position.numpy())]
    else:
        words = list(random_bits(seed, candidate, position))
    return torch.stack(words, -1).to(torch.int32)
