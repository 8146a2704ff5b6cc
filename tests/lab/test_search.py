"""The search on engines whose edge is known, with noise, lies and holes."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from paceline.lab.measure import measure
from paceline.lab.point import Counts, Point
from paceline.lab.search import SearchResult, find_batch, find_rate, judge
from paceline.lab.slo import Constraint, parse_constraints
from paceline.lab.statistics import wilson

from made_replies import log_of, reply, steady  # isort: skip

BLANK = measure(log_of([steady(0, 0.0)]), parse_constraints("ttft_p99 < 1s"))


def point(kept: int, count: int = 512, **more: Any) -> Point:
    fields: dict[str, Any] = {
        "valid": True,
        "reasons": [],
        "requests": Counts(count, count, 0),
        "attainment": kept / count,
        "effective_requests": float(count),
    }
    return replace(BLANK, **(fields | more))


class Engine:
    """Keeps every constraint below ``edge``; above it loses them with the load."""

    def __init__(self, edge: float, noise: float = 0.0, seed: int = 0, count: int = 512) -> None:
        self.edge, self.noise, self.count, self.draw = edge, noise, count, random.Random(seed)
        self.loads: list[float] = []

    def __call__(self, load: float) -> Point:
        self.loads.append(load)
        share = max(0.0, min(1.0, 1.0 - 0.01 * (load / self.edge) ** 8)) if self.noise else float(load <= self.edge)
        kept = sum(self.draw.random() < share for _ in range(self.count))
        return point(kept, self.count, name=f"load={load:g} #{len(self.loads)}")


def test_finds_the_edge_to_the_tolerance() -> None:
    engine = Engine(13.7)
    found = find_rate(engine, 1, 100, tolerance=0.02)
    assert found.ended == "edge"
    assert found.load is not None
    assert found.load <= 13.7 < found.load * 1.02
    assert (found.verdict, found.kept) == ("kept", found.load)
    assert found.broken is not None
    assert 13.7 < found.broken <= found.load * 1.02
    assert max(engine.loads) == 16  # doubled, and never far above
    assert len(engine.loads) == sum(len(probe.points) for probe in found.probes) <= 14
    assert [probe.load for probe in found.probes] == sorted(set(engine.loads))
    assert (found.target, found.constraints) == ("engine", ["ttft_p99 < 1s"])


def test_finds_the_largest_batch_exactly() -> None:
    engine = Engine(21)
    found = find_batch(engine, 1, 256, tolerance=0.001)
    assert (found.load, found.broken, found.ended) == (21, 22, "edge")
    assert all(load == int(load) for load in engine.loads)


def test_bounds_are_kept() -> None:
    found = find_rate(Engine(1000), 3, 50)
    assert (found.load, found.ended, found.broken) == (50, "all kept", None)
    engine = Engine(1)
    found = find_rate(engine, 3, 50)
    assert (found.load, found.verdict, found.kept, found.broken, found.ended) == (None, None, None, 3, "none kept")
    assert engine.loads == [3, 3]  # a single measurement decides nothing
    assert find_batch(Engine(1), 1, 1).load == 1


def test_stages_are_bounded() -> None:
    engine = Engine(13.7)
    found = find_rate(engine, 1, 1e6, tolerance=1e-6, max_stages=7)
    assert (len(engine.loads), found.ended) == (7, "stages")
    assert found.load is not None
    assert found.load <= 13.7


def test_noise_near_the_edge_is_measured_again_and_named() -> None:
    """At the edge 99% keep the constraints, which is what is asked for: no number of requests settles that."""
    engine = Engine(10, noise=1.0, seed=4)
    found = find_rate(engine, 1, 100, tolerance=0.02, repeats=3)
    assert found.load == pytest.approx(10, rel=0.12)
    assert found.verdict == "indistinguishable"
    assert max(engine.loads.count(load) for load in engine.loads) == 3
    assert found.kept is not None
    assert found.kept < found.load


@pytest.mark.parametrize("seed", range(20))
def test_the_true_edge_lies_between_kept_and_broken(seed: int) -> None:
    found = find_rate(Engine(10, noise=1.0, seed=seed, count=1024), 1, 100, tolerance=0.02)
    assert (found.kept or 0) <= 10 * 1.03
    assert (found.broken or 1000) >= 10 * 0.97
    assert found.load is not None
    assert found.load == pytest.approx(10, rel=0.15)


def waits_less(t: float, rate: float, service_s: float) -> float:
    """Share of the requests that wait less in a queue with Poisson arrivals and fixed service (Erlang, 1909)."""
    terms = range(int(t / service_s + 1e-9) + 1)
    lags = [rate * (t - k * service_s) for k in terms]
    return (1 - rate * service_s) * sum(
        (-lag) ** k / math.factorial(k) * math.exp(lag) for k, lag in zip(terms, lags, strict=True)
    )


def queue(service_s: float, slo: Sequence[Constraint], seed: int) -> Callable[[float], Point]:
    """Points of a server of one request at a time, each of them by other Poisson arrivals."""
    runs = 0

    def at(rate: float) -> Point:
        nonlocal runs
        runs += 1
        draw = random.Random(f"{seed} {runs}")
        records, due, free = [], 0.0, 0.0
        for id in range(512):
            due += draw.expovariate(rate)
            free = max(free, due) + service_s
            records.append(reply(id, due, [(free, 1)]))
        return measure(log_of(records, load={"kind": "poisson", "rate": rate}, offered_rate=rate), slo)

    return at


@pytest.mark.parametrize("seed", range(4))
def test_a_queue_whose_edge_is_known(seed: int) -> None:
    """From records to the answer: up to 7.6 requests/s 90% wait less than 0.4 s and are answered in half a second."""
    assert waits_less(0.4, 7.565, 0.1) == pytest.approx(0.9, abs=0.002)
    found = find_rate(queue(0.1, parse_constraints("ttft_p90 < 500ms"), seed), 1, 20, attainment=0.9)
    assert found.load == pytest.approx(7.565, rel=0.15)
    assert found.kept is not None
    assert found.kept < 8.2
    assert found.broken is None or found.broken > 7.2


@pytest.mark.parametrize("seed", range(3))
def test_no_load_above_capacity_is_the_answer(seed: int) -> None:
    """50 requests/s at most; in ten seconds of a little more no request waits for a second."""
    found = find_rate(queue(0.02, parse_constraints("ttft_p99 < 1s"), seed), 5, 80)
    assert found.load is not None
    assert found.load < 50 * 1.04
    assert found.kept is None or found.kept <= 50


def scripted(answers: dict[float, list[Point]]) -> Callable[[float], Point]:
    """Each load's points in turn; the last one again and again."""

    def at(load: float) -> Point:
        points = answers[load]
        return points.pop(0) if len(points) > 1 else points[0]

    return at


def test_a_fluke_is_overturned_by_its_repeats() -> None:
    """One run broke by a stall that does not come again: the search goes on above it."""
    fine, stalled, broken = point(512), point(400), point(0)
    found = find_batch(scripted({1: [fine], 2: [stalled, fine], 4: [fine], 8: [broken], 6: [broken], 5: [fine]}), 1, 8)
    assert (found.load, found.broken) == (5, 6)
    assert next(probe for probe in found.probes if probe.load == 2).verdict == "indistinguishable"


def test_a_repeat_that_breaks_moves_the_edge_down() -> None:
    fine, lucky, broken = point(2048, 2048), point(507), point(300)
    found = find_batch(scripted({1: [fine], 2: [lucky, broken], 4: [broken], 3: [broken]}), 1, 4)
    assert (found.load, found.broken, found.verdict) == (1, 2, "kept")


def test_loads_below_an_unsure_answer_are_repeated_until_one_is_surely_kept() -> None:
    few, broken = point(200, 200), point(0)
    found = find_batch(
        scripted({1: [few], 2: [few], 4: [point(198, 200)], 8: [broken], 6: [broken], 5: [broken]}), 1, 8
    )
    assert (found.load, found.verdict, found.kept, found.ended) == (4, "indistinguishable", 2, "edge")
    assert [len(probe.points) for probe in found.probes] == [1, 2, 3, 2, 1, 1]


def test_invalid_points_never_decide() -> None:
    def at(load: float) -> Point:
        if load > 6:
            return point(0, valid=False, reasons=["lateness: the client was late"])
        return point(512)

    found = find_rate(at, 1, 64)
    assert found.load is not None
    assert found.load <= 6 < found.load * 1.06
    assert (found.ended, found.broken, found.verdict) == ("invalid", None, "kept")
    assert "could not be measured: lateness: the client was late" in found.notes[0]
    assert find_rate(lambda _: point(512, valid=False), 1, 64).ended == "invalid"
    assert find_rate(lambda _: point(512, valid=False), 1, 64).load is None


def test_one_invalid_point_of_a_load_is_measured_again() -> None:
    bad = point(0, valid=False, reasons=["clock: ..."])
    found = find_batch(scripted({1: [bad, point(512)], 2: [point(512)]}), 1, 2)
    assert (found.load, found.ended) == (2, "all kept")


def test_a_saturated_engine_keeps_nothing_for_long() -> None:
    probe = judge(5.0, [point(512, notes=["saturated: ..."])], 0.99)
    assert (probe.verdict, probe.passes) == ("broken", False)


def test_a_load_that_saturates_in_some_runs_is_not_surely_kept() -> None:
    fine, full = point(512), point(512, notes=["saturated: ..."])
    one_of_two, one_of_three = judge(5.0, [fine, full], 0.99), judge(5.0, [fine, full, fine], 0.99)
    assert (one_of_two.verdict, one_of_two.passes) == ("indistinguishable", False)
    assert (one_of_three.verdict, one_of_three.passes) == ("indistinguishable", True)
    assert judge(5.0, [fine, full, full], 0.99).verdict == "broken"


def test_judge_by_the_pooled_interval() -> None:
    assert judge(1, [point(512)], 0.99).verdict == "kept"
    assert judge(1, [point(100, 100)], 0.99).verdict == "indistinguishable"
    assert judge(1, [point(100, 100)] * 4, 0.99).verdict == "kept"
    assert judge(1, [point(490)], 0.99).verdict == "broken"
    assert judge(1, [point(512), point(300)], 0.99).verdict == "indistinguishable"
    assert not judge(1, [point(512), point(300)], 0.99).passes
    assert judge(1, [point(512), point(300), point(512)], 0.99).passes
    pooled = judge(1, [point(99, 100), point(495, 500), point(0, valid=False)], 0.99)
    assert pooled.attainment == pytest.approx(0.99)
    assert pooled.passes
    assert pooled.interval == pytest.approx(wilson(0.99, 600))
    assert len(pooled.points) == 3
    with pytest.raises(ValueError, match="without constraints"):
        judge(1, [point(1, attainment=None)], 0.99)


@pytest.mark.parametrize(
    "arguments",
    [
        {"low": 0, "high": 1}, {"low": 2, "high": 1}, {"low": 1, "high": float("inf")}, {"attainment": 0},
        {"attainment": 1.1}, {"tolerance": 0}, {"repeats": 0}, {"max_stages": 0},
    ],
)  # fmt: skip
def test_arguments_out_of_range(arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        find_rate(Engine(1), **({"low": 1, "high": 2} | arguments))  # type: ignore[arg-type]


def test_the_result_says_which_load_was_meant() -> None:
    found: SearchResult = find_rate(Engine(5), 1, 8)
    assert (found.over, find_batch(Engine(5), 1, 8).over, found.attainment) == ("rate", "batch", 0.99)
