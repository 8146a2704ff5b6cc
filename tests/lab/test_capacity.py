"""The highest load that keeps the constraints."""

import math

import pytest

from lab.measured import SLO, invalid, point
from paceline.lab.capacity import broken_by, capacity, load, value_of
from paceline.lab.slo import parse_constraints

CONSTRAINTS = parse_constraints(SLO)
SLOW = (0.5, 3.0)
"""A TTFT that breaks `SLO`."""


def test_best_lies_below_the_first_that_breaks() -> None:
    points = [point(rate=rate, ttft=SLOW if rate > 5 else (0.1, 0.2)) for rate in (7.0, 1.0, 6.0, 5.0, 3.0)]
    found = capacity(points, CONSTRAINTS)
    assert found.best is not None
    assert found.broken is not None
    assert (load(found.best), load(found.broken)) == (5.0, 6.0)
    assert found.span == (5.0, 6.0)
    assert found.kept_above is None


def test_a_load_that_keeps_them_above_one_that_breaks_is_no_promise() -> None:
    points = [point(rate=1.0), point(rate=3.0, ttft=SLOW), point(rate=5.0)]
    found = capacity(points, CONSTRAINTS)
    assert found.span == (1.0, 3.0)
    assert found.kept_above is points[2]


def test_a_repeat_that_breaks_takes_the_load_away() -> None:
    points = [point(rate=1.0), point(rate=3.0), point(rate=3.0, ttft=SLOW)]
    assert capacity(points, CONSTRAINTS).span == (1.0, 3.0)


def test_points_that_are_not_valid_decide_nothing() -> None:
    points = [point(rate=1.0), invalid(point(rate=2.0, ttft=SLOW), "rate: low"), invalid(point(rate=9.0), "loop: slow")]
    found = capacity(points, CONSTRAINTS)
    assert found.span == (1.0, math.inf)
    assert (found.valid, found.invalid) == (1, 2)


def test_what_was_not_measured_is_not_kept() -> None:
    """failure 98"""
    found = capacity([point(rate=1.0, tpot=None)], CONSTRAINTS)
    assert found.best is None
    assert found.span == (0.0, 1.0)


def test_a_limit_that_failures_break_is_not_kept() -> None:
    """The p99 of the completed requests is within it, but less than 99% of all were."""
    failing = point(rate=4.0, constraints={"ttft_p99<1s": False, "tpot_p99 < 20ms": True})
    assert capacity([point(rate=1.0), failing], CONSTRAINTS).span == (1.0, 4.0)
    assert broken_by(failing, CONSTRAINTS) == CONSTRAINTS[:1]
    assert value_of(failing, CONSTRAINTS[0]) is None
    assert value_of(failing, CONSTRAINTS[1]) == 0.015
    assert broken_by(failing, parse_constraints("ttft_p99 < 2s")) == []


def test_a_saturated_point_is_not_kept() -> None:
    points = [point(rate=1.0), point(rate=4.0, notes=["saturated: requests in flight grew"])]
    assert capacity(points, CONSTRAINTS).span == (1.0, 4.0)


def test_batches_are_loads_and_bursts_are_none() -> None:
    points = [point(batch=8), point(batch=64, tpot=(0.02, 0.03)), point(batch=16)]
    assert capacity(points, CONSTRAINTS).span == (16.0, 64.0)
    with pytest.raises(ValueError, match="no rate and no batch"):
        capacity([point()], CONSTRAINTS)


def test_nothing() -> None:
    found = capacity([], CONSTRAINTS)
    assert found.best is found.broken is None
    assert found.span == (0.0, math.inf)
