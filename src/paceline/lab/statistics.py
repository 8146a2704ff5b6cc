"""Statistics of samples whose neighbours depend on each other, as requests of one queue do.

Percentiles interpolate between the two nearest values (``numpy.percentile``, method ``linear``; type 7 of Hyndman and
Fan, 1996). Intervals are for 95% confidence.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from paceline.lab.point import Statistics

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Interval = tuple[float, float]

CONFIDENCE = 0.95
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
BLOCKS = 16
"""Runs of neighbouring requests whose differences show how dependent neighbours are."""
BEYOND = 200
"""Values beyond a percentile that its interval needs. With fewer it may be that no burst of a queue has come yet, and
those runs in which none came would look the most certain."""

_Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


@dataclass(frozen=True, slots=True)
class Sample:
    """Values in the order of their requests."""

    values: Floats
    blocks: Ints
    """Of each value, the block its request belongs to."""


def blocks_of(count: int) -> Ints:
    """Numbers 0 to ``BLOCKS - 1``, each for as many neighbouring requests as the others (or one more)."""
    return np.arange(count) * BLOCKS // max(count, 1)


def summarize(values: Floats) -> Statistics:
    if values.size == 0:
        return Statistics(None, None, None, None, None, None)
    levels = np.percentile(values, [100 * share for share in PERCENTILES.values()], method="linear").tolist()
    p50, p90, p95, p99 = levels
    return Statistics(float(values.mean()), p50, p90, p95, p99, float(values.max()))


def requests_needed(share: float) -> int:
    """Values of which the largest lies above the percentile with 95% confidence: 5 for p50, 59 for p95, 299 for p99."""
    return math.ceil(math.log(1 - CONFIDENCE) / math.log(share))


def values_for_interval(share: float) -> int:
    """Values that the interval of a percentile takes: 400 for p50, 2,000 for p90, 4,000 for p95, 20,000
    for p99."""
    return math.ceil(round(BEYOND / min(share, 1 - share), 6))


def wilson(share: float, count: float) -> Interval:
    """Score interval of a share seen in ``count`` independent trials (Wilson, 1927)."""
    if count <= 0:
        return 0.0, 1.0
    square = _Z * _Z / count
    centre = (share + square / 2) / (1 + square)
    half = _Z / (1 + square) * math.sqrt(share * (1 - share) / count + square / (4 * count))
    # At the ends the interval touches them; rounding must not move it.
    return (0.0 if share == 0 else max(0.0, centre - half)), (1.0 if share == 1 else min(1.0, centre + half))


def effective_count(kept: npt.NDArray[np.bool_], blocks: Ints) -> float:
    """Independent trials worth as much as these: their number by the design effect (Kish, 1965) of the blocks, less
    what its estimate from few blocks leaves open (Korn and Graubard, 1998); never more than there are values.

    Misses behind one queue come in runs; taken as independent their interval would be too narrow. With fewer than four
    values a block there is nothing to estimate it from, and the values count as independent.
    """
    share = float(kept.mean()) if kept.size else 0.0
    if kept.size < 4 * BLOCKS or share in (0.0, 1.0):
        return float(kept.size)
    sizes = np.bincount(blocks)
    sums = np.bincount(blocks, weights=kept)
    sizes, sums = sizes[sizes > 0], sums[sizes > 0]
    if sizes.size < 2:
        return float(kept.size)
    between = float((sizes * (sums / sizes - share) ** 2).sum()) / (sizes.size - 1)
    effect = between / (share * (1 - share)) * (t_quantile(sizes.size - 1) / _Z) ** 2
    return kept.size / max(1.0, effect)


def effective_requests(severity: Floats, kept: npt.NDArray[np.bool_], blocks: Ints) -> float:
    """As `effective_count`, of requests that kept their constraints or did not.

    Few misses, or none, do not show whether they come in runs. Then those of the worst tenth of the requests that took
    more than half of a limit stand in for them.

    Args:
        severity: Of each request, how much of its limit it took; infinite for failures.
    """
    found = effective_count(kept, blocks)
    if kept.size and kept.mean() > 0.9:
        tenth = float(np.quantile(severity, 0.9, method="lower"))
        found = min(found, effective_count(severity <= max(tenth, 0.5), blocks))
    return found


def mean_interval(sample: Sample) -> Interval | None:
    """Of the mean, from the means of the blocks (batch means); None with fewer than two values in each of them."""
    values, count = sample.values, sample.values.size
    if count < 2 * BLOCKS:
        return None
    sizes = np.bincount(sample.blocks, minlength=BLOCKS)
    if (sizes == 0).any():
        return None
    mean = float(values.mean())
    rests = np.bincount(sample.blocks, weights=values, minlength=BLOCKS) - mean * sizes
    error = math.sqrt(BLOCKS / (BLOCKS - 1) * float((rests**2).sum())) / count
    half = t_quantile(BLOCKS - 1) * error
    return mean - half, mean + half


def percentile_interval(sample: Sample, share: float) -> Interval | None:
    """Of a percentile: the sample's percentiles at the ends of the interval of ``share`` (Woodruff, 1952).

    None with fewer than ``BEYOND`` values beyond it.
    """
    if sample.values.size < values_for_interval(share):
        return None
    below = sample.values <= np.percentile(sample.values, 100 * share)
    # Bursts may be as long as a block: then two of them differ less than their halves do.
    count = min(effective_count(below, sample.blocks // 2), effective_count(below, sample.blocks))
    low, high = np.percentile(sample.values, [100 * end for end in wilson(share, count)])
    return float(low), float(high)


def intervals(sample: Sample) -> dict[str, Interval]:
    """Of the mean and the percentiles, by the names of the fields of `Statistics`."""
    found = {"mean": mean_interval(sample)}
    found |= {name: percentile_interval(sample, share) for name, share in PERCENTILES.items()}
    return {name: interval for name, interval in found.items() if interval is not None}


def t_quantile(freedom: float) -> float:
    """Two-sided 95% quantile of Student's t; degrees of freedom are rounded down, which is the careful side.

    From 3 on by the Cornish-Fisher expansion (Abramowitz and Stegun, 26.7.5), off by less than 0.2%.
    """
    n = math.floor(freedom)
    if n < 1:
        raise ValueError("at least one degree of freedom")
    if n < 3:
        level = CONFIDENCE
        return math.tan(math.pi * level / 2) if n == 1 else level * math.sqrt(2 / (1 - level**2))
    z = _Z
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * n**4)
    )


def welch(a: Floats, b: Floats) -> Interval:
    """Of the difference of the means, b - a, of independent values with unlike variances (Welch, 1947).

    Raises:
        ValueError: fewer than two values on a side.
    """
    if min(a.size, b.size) < 2:
        raise ValueError("Welch's interval needs two values on each side")
    errors = float(a.var(ddof=1)) / a.size, float(b.var(ddof=1)) / b.size
    both = sum(errors)
    difference = float(b.mean() - a.mean())
    if both == 0:
        return difference, difference
    freedom = both**2 / (errors[0] ** 2 / (a.size - 1) + errors[1] ** 2 / (b.size - 1))
    half = t_quantile(freedom) * math.sqrt(both)
    return difference - half, difference + half


def difference_interval(a: float, a_interval: Interval, b: float, b_interval: Interval) -> Interval:
    """Of b - a from an interval of each, by the squares of the distances to their ends (MOVER).

    With Wilson's intervals it is Newcombe's hybrid score interval of two shares (1998, method 10).
    """
    low = math.hypot(b - b_interval[0], a_interval[1] - a)
    high = math.hypot(b_interval[1] - b, a - a_interval[0])
    return b - a - low, b - a + high
