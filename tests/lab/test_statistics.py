"""Intervals against published figures, and their coverage on series whose truth is known."""

import math

import numpy as np
import pytest

from paceline.lab.statistics import (
    BLOCKS,
    PERCENTILES,
    Sample,
    blocks_of,
    difference_interval,
    effective_count,
    effective_requests,
    intervals,
    mean_interval,
    percentile_interval,
    requests_needed,
    summarize,
    t_quantile,
    values_for_interval,
    welch,
    wilson,
)


@pytest.mark.parametrize(
    ("kept", "count", "low", "high"),
    # Newcombe, Statistics in Medicine 17 (1998) 857-872, table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_published(kept: int, count: int, low: float, high: float) -> None:
    assert wilson(kept / count, count) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


def test_wilson_ends() -> None:
    assert wilson(1.0, 100)[1] == 1.0
    assert wilson(0.0, 100)[0] == 0.0
    assert wilson(0.5, 0) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("a", "n", "b", "m", "low", "high"),
    # Newcombe, Statistics in Medicine 17 (1998) 873-890, table II, method 10: differences a/n - b/m.
    [(56, 70, 48, 80, 0.0524, 0.3339), (9, 10, 3, 10, 0.1705, 0.8090), (10, 10, 0, 10, 0.6075, 1.0)],
)
def test_newcombe_published(a: int, n: int, b: int, m: int, low: float, high: float) -> None:
    found = difference_interval(b / m, wilson(b / m, m), a / n, wilson(a / n, n))
    assert found == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


@pytest.mark.parametrize(
    ("freedom", "value"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (5, 2.5706), (10, 2.2281), (15.9, 2.1314), (30, 2.0423)],
)
def test_t_published(freedom: float, value: float) -> None:
    assert t_quantile(freedom) == pytest.approx(value, rel=2e-3)
    with pytest.raises(ValueError, match="degree"):
        t_quantile(0.5)


def test_welch_by_hand() -> None:
    # Means 2 and 5, variances 1 and 4, three values each: errors 1/3 and 4/3, freedom (5/3)^2 / (1/18 + 16/18) = 2.94.
    low, high = welch(np.array([1.0, 2.0, 3.0]), np.array([3.0, 5.0, 7.0]))
    assert (low + high) / 2 == pytest.approx(3)
    assert (high - low) / 2 == pytest.approx(4.3027 * (5 / 3) ** 0.5, rel=1e-4)
    assert welch(np.array([1.0, 1.0]), np.array([2.0, 2.0])) == (1.0, 1.0)
    with pytest.raises(ValueError, match="two values"):
        welch(np.array([1.0]), np.array([2.0, 3.0]))


def test_requests_needed() -> None:
    assert [requests_needed(share) for share in (0.5, 0.9, 0.95, 0.99)] == [5, 29, 59, 299]
    assert 1 - 0.99**299 >= 0.95 > 1 - 0.99**298


def test_blocks_are_even() -> None:
    sizes = np.bincount(blocks_of(100))
    assert sizes.size == BLOCKS
    assert set(sizes.tolist()) == {6, 7}
    assert blocks_of(0).size == 0


def test_misses_in_a_run_are_worth_less_than_scattered_ones() -> None:
    blocks = blocks_of(512)
    scattered, run = np.ones(512, bool), np.ones(512, bool)
    scattered[::16] = False
    run[200:232] = False
    assert effective_count(scattered, blocks) == 512
    assert effective_count(run, blocks) < 60
    assert effective_count(np.ones(512, bool), blocks) == 512
    assert effective_count(run[:30], blocks_of(30)) == 30


def test_few_misses_are_judged_by_those_that_came_close() -> None:
    """No miss at all says nothing of whether misses come in runs; waits near the limit do."""
    kept, blocks = np.ones(512, bool), blocks_of(512)
    severity = np.full(512, 0.3)
    assert effective_requests(severity, kept, blocks) == 512
    severity[100:150] = 0.9
    assert effective_requests(severity, kept, blocks) < 100
    severity[100:150] = 0.4  # nowhere near
    assert effective_requests(severity, kept, blocks) == 512
    severity[::11] = 0.9
    assert effective_requests(severity, kept, blocks) == 512
    kept[:5] = False
    severity[:5] = np.inf
    assert effective_requests(severity, kept, blocks) < 512


def autocorrelated(count: int, share: float, draw: np.random.Generator) -> np.ndarray:
    """A first-order autoregression with mean 0 and variance 1."""
    found = np.empty(count)
    value = draw.normal()
    for place, noise in enumerate(draw.normal(size=count) * (1 - share**2) ** 0.5):
        found[place] = value = share * value + noise
    return found


def test_coverage_with_dependent_neighbours() -> None:
    draw = np.random.default_rng(1)
    runs, held = 600, {"mean": 0, "share": 0, "taken as independent": 0}
    blocks = blocks_of(800)
    for _ in range(runs):
        values = autocorrelated(800, 0.7, draw)
        low, high = mean_interval(Sample(values, blocks)) or (0, 0)
        held["mean"] += low <= 0 <= high
        kept = values < 1.2816
        low, high = wilson(kept.mean(), effective_count(kept, blocks))
        held["share"] += low <= 0.9 <= high
        low, high = wilson(kept.mean(), 800)
        held["taken as independent"] += low <= 0.9 <= high
    assert held["taken as independent"] < 0.88 * runs  # what the blocks are for
    for name in ("mean", "share"):
        assert held[name] > 0.88 * runs, name


def queue(runs: int, count: int, busy: float, draw: np.random.Generator) -> np.ndarray:
    """Times in an M/M/1 queue from its steady state on, with one request served a second, [runs, requests]."""
    gaps, work = draw.exponential(1 / busy, (runs, count)), draw.exponential(size=(runs, count))
    found = np.empty((runs, count))
    found[:, 0] = draw.exponential(1 / (1 - busy), runs)
    for place in range(1, count):
        found[:, place] = np.maximum(0, found[:, place - 1] - gaps[:, place]) + work[:, place]
    return found


@pytest.mark.parametrize("share", PERCENTILES.values())
@pytest.mark.parametrize("busy", [0.3, 0.5, 0.7])
def test_coverage_of_percentiles_behind_a_queue(busy: float, share: float) -> None:
    """The time in the queue is exponential. Every run of this length has an interval: were there none in those that met
    a burst, the ones with an interval would be those that saw none."""
    runs, count = 100, values_for_interval(share)
    truth, blocks = -math.log(1 - share) / (1 - busy), blocks_of(count)
    times = queue(runs, count, busy, np.random.default_rng(2))
    found = [percentile_interval(Sample(values, blocks), share) for values in times]
    assert sum(interval is not None and interval[0] <= truth <= interval[1] for interval in found) >= 0.85 * runs
    assert all(percentile_interval(Sample(values[1:], blocks[1:]), share) is None for values in times)


def test_too_few_for_an_interval() -> None:
    assert intervals(Sample(np.arange(20.0), blocks_of(20))) == {}
    assert set(intervals(Sample(np.arange(399.0), blocks_of(399)))) == {"mean"}
    assert set(intervals(Sample(np.arange(400.0), blocks_of(400)))) == {"mean", "p50"}
    assert intervals(Sample(np.empty(0), blocks_of(0))) == {}
    assert [values_for_interval(share) for share in PERCENTILES.values()] == [400, 2000, 4000, 20000]


def test_summary_of_nothing_is_null() -> None:
    assert summarize(np.empty(0)).p99 is None
