"""Distributions of token counts."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.lab.workload.invalid import InvalidWorkload

Lengths = Callable[[int, np.random.Generator], NDArray[np.int64]]
"""(n, generator) -> int64 [n], each at least 1."""


def fixed(tokens: int) -> Lengths:
    """Always the same."""
    return lambda n, rng: np.full(n, tokens, np.int64)


def uniform(low: int, high: int) -> Lengths:
    """Every whole number from ``low`` to ``high``, both included, equally often."""
    return lambda n, rng: rng.integers(low, high, size=n, endpoint=True)


def normal(mean: float, std: float, low: int = 1, high: int | None = None) -> Lengths:
    """Normal, rounded. What lies outside of ``low`` to ``high`` is set to the nearer one, which moves the mean."""
    return lambda n, rng: _rounded(rng.normal(mean, std, n), low, high)


def lognormal(mean: float, std: float, low: int = 1, high: int | None = None) -> Lengths:
    """Log-normal with the mean and standard deviation *of the lengths* (not of their logarithms), rounded; limits as
    in `normal`."""
    variance = math.log1p((std / mean) ** 2)
    centre = math.log(mean) - variance / 2
    return lambda n, rng: _rounded(rng.lognormal(centre, math.sqrt(variance), n), low, high)


def empirical(values: Sequence[int]) -> Lengths:
    """Drawn from observed lengths, with repetition."""
    observed = np.array(values, np.int64)
    return lambda n, rng: rng.choice(observed, n)


def read_lengths(path: Path) -> list[int]:
    """Observed lengths from a text file: one whole number a line; empty lines are skipped.

    Raises:
        InvalidWorkload: names the file and line.
    """
    values = []
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidWorkload(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if not line.strip().isdecimal() or int(line) < 1:
            raise InvalidWorkload(f"{path}:{number}: a length is a whole number of at least 1, not {line.strip()!r}")
        values.append(int(line))
    if not values:
        raise InvalidWorkload(f"{path}: holds no lengths")
    return values


def _rounded(values: NDArray[np.float64], low: int, high: int | None) -> NDArray[np.int64]:
    return np.clip(np.rint(values), low, high).astype(np.int64)
