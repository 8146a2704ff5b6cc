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


def random_bits(seed: Words, candidate: Words, position: Words) -> Words:
    """53 random bits for each token, int64; arguments as for `uniforms`."""
    zero = seed * 0
    high, low, _, _ = philox4x32((position, candidate, zero, zero), (seed & _MASK, (seed >> 32) & _MASK))
    return (high >> 5) * 2**26 + (low >> 6)


def uniforms(seed: Tensor, candidate: Tensor, position: Tensor) -> Tensor:
    """One draw for each token: float64 ``[N]`` in [0, 1).

    Args:
        seed: int64 ``[N]``, signed.
        candidate: int64 ``[N]``, 0 to 2**32 - 1.
        position: int64 ``[N]``: where the token that is drawn will stand, 0 to 2**32 - 1.
    """
    if position.device.type == "cpu":  # about a hundred operations on a few words: far cheaper in numpy
        bits = torch.from_numpy(random_bits(seed.numpy(), candidate.numpy(), position.numpy()))
    else:
        bits = random_bits(seed, candidate, position)
    return bits.double() * 2.0**-53
