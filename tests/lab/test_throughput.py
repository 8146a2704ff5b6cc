"""Intervals of throughput: how often they hold what the same run gives on average, and where there is none."""

import math

import numpy as np
import pytest
from made_replies import log_of, steady

from paceline.lab.measure import measure
from paceline.lab.record import RequestRecord
from paceline.lab.slo import parse_constraints
from paceline.lab.statistics import Floats
from paceline.lab.throughput import Flow

RUNS = 200
SEATS = 8


def noise(rng: np.random.Generator, count: int, memory: float, deviation: float) -> Floats:
    """First-order autoregressions with mean 0, [RUNS, count]."""
    found = rng.standard_normal((RUNS, count)) * deviation * math.sqrt(1 - memory**2)
    found[:, 0] /= math.sqrt(1 - memory**2)
    for place in range(1, count):
        found[:, place] += memory * found[:, place - 1]
    return found


def coverage(flows: list[tuple[Flow, Floats]]) -> tuple[float, float]:
    """The share of intervals that hold the mean of all runs, and the middle half-width. The values are logarithms."""
    values = np.array([math.log(float(work.sum()) / flow.window_s) for flow, work in flows])
    errors = np.array([flow.error(work) for flow, work in flows], dtype=float)
    return float(np.mean(np.abs(values - values.mean()) <= errors)), float(np.median(errors))


def closed_loop(speed: Floats, work: Floats) -> tuple[Flow, Floats]:
    """Seats that are always busy, at a speed that is the same for all: [times] in steps of 0.1 s, [seats, rounds]."""
    times = np.arange(speed.size) * 0.1
    done = np.cumsum(speed) * 0.1
    ends = np.cumsum(work, axis=1)
    begin, end = (np.interp(at, done, times).ravel() for at in (ends - work, ends))
    return Flow(begin, end, None, float(end.max())), work.ravel()


@pytest.mark.parametrize("lockstep", [True, False])
@pytest.mark.parametrize(("memory", "widest"), [(0.0, 0.012), (0.9, 0.055), (0.98, 0.13)])
def test_coverage_of_a_closed_loop(memory: float, widest: float, lockstep: bool) -> None:
    """Speeds that vary by 20% and remember themselves for 0, 1 or 5 s, in runs of about 200 s."""
    rng = np.random.default_rng(3)
    speeds = np.maximum(0.05, 1 + noise(rng, 4000, memory, 0.2))
    flows = []
    for speed in speeds:
        work = np.full((SEATS, 20), 10.0) if lockstep else rng.uniform(5, 15, (SEATS, 20))
        # Seats are given out so that they end together.
        flows.append(closed_loop(speed, work * (200 / work.sum(axis=1, keepdims=True))))
    held, width = coverage(flows)
    assert 0.9 <= held <= 0.995
    assert width < widest


def test_coverage_of_an_open_loop() -> None:
    """An engine that keeps up with Poisson arrivals serves what arrives: the schedule is no noise of the engine."""
    rng, count, rate = np.random.default_rng(4), 300, 2.0
    delays, lengths = noise(rng, count, 0.9, 0.3), noise(rng, count, 0.9, 0.5)
    with_schedule, without = [], []
    for delay, length in zip(delays, lengths, strict=True):
        due = np.concatenate([[0.0], np.cumsum(rng.exponential(size=count - 1))])
        due *= (count - 1) / rate / due[-1]
        begin = due + np.maximum(0.1, 1 + delay)
        end = begin + np.maximum(0.1, 2 + length)
        with_schedule.append((Flow(begin, end, due, float(end.max())), np.ones(count)))
        without.append((Flow(begin, end, None, float(end.max())), np.ones(count)))
    held, width = coverage(with_schedule)
    assert held >= 0.9
    assert width < coverage(without)[1] / 3


@pytest.mark.parametrize("weigh", ["kept", "tokens"])
def test_coverage_of_what_the_schedule_does_not_decide(weigh: str) -> None:
    """Of one schedule, runs in which other requests keep the constraints, or other replies are long."""
    rng, count, flows = np.random.default_rng(6), 300, []
    due = np.cumsum(rng.exponential(size=count))
    for _ in range(RUNS):
        begin = due + rng.exponential(0.2, count)
        work = rng.integers(1, 400, count).astype(float) if weigh == "tokens" else (rng.random(count) < 0.8) * 1.0
        flows.append((Flow(begin, begin + 0.5, due, float(begin.max() + 0.5)), work))
    held, width = coverage(flows)
    assert held >= 0.9
    deviation = np.std([math.log(float(work.sum()) / flow.window_s) for flow, work in flows])
    assert 1.96 * deviation < width < 4 * deviation


RATES = ("output_tokens_per_s", "requests_per_s", "goodput_rps")


def loop(durations: list[float], seats: int) -> list[RequestRecord]:
    """A closed loop whose requests take so long, from one to the next of a seat."""
    ends, records = [0.0] * seats, []
    for id, duration in enumerate(durations):
        due = ends[id % seats]
        ends[id % seats] += duration
        records.append(steady(id, due, ttft=duration / 4, tpot=duration / 12, tokens=10))
    return records


def test_a_point_has_intervals_of_its_rates() -> None:
    draw = np.random.default_rng(5)
    durations = draw.uniform(0.9, 1.1, 200).tolist()
    log = log_of(loop(durations, 4), load={"kind": "concurrency", "batch": 4}, client={})
    point = measure(log, parse_constraints("ttft_mean < 255ms"))  # half of the durations keep it
    for name in RATES:
        low, high = point.intervals[name]
        rate = getattr(point, name)
        assert low < rate < high
        assert low * high == pytest.approx(rate**2)
    tokens, requests, goodput = (point.intervals[name] for name in RATES)
    assert tokens == pytest.approx([10 * end for end in requests])
    assert requests[1] / requests[0] < 1.03 < goodput[1] / goodput[0]
    assert not set(RATES) & set(measure(log_of([])).intervals)


def test_one_wave_is_one_observation() -> None:
    """All requests at once in one batch, or in two; too few requests; none that is kept."""
    for waves, known in ((1, False), (2, False), (4, True)):
        records = [steady(id, 0.0, ttft=0.1 + (id * waves // 64), tpot=0.1, tokens=10) for id in range(64)]
        assert (set(RATES[:2]) <= set(measure(log_of(records)).intervals)) is known
    assert not set(RATES) & set(measure(log_of(loop([1.0] * 15, 1))).intervals)
    point = measure(log_of(loop([1.0] * 40, 1)), parse_constraints("ttft_mean < 1ms"))
    assert point.goodput_rps == 0
    assert "goodput_rps" not in point.intervals
    assert "requests_per_s" in point.intervals
