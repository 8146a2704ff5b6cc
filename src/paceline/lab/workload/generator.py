"""Random numbers that a seed repeats."""

from zlib import crc32

import numpy as np


def generator(seed: int, purpose: str, run: int = 0) -> np.random.Generator:
    """Independent streams for each purpose and run, so that changing one part of a workload leaves the others alone.

    The bit generator is named because ``default_rng`` may change it; PCG64 gives the same bits everywhere.
    """
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, run, crc32(purpose.encode())])))
