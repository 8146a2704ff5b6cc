"""What differs, and what only looks as if it did."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from made_replies import log_of, steady

from paceline.lab.compare import Difference, NothingToCompare, compare, compare_targets
from paceline.lab.measure import measure
from paceline.lab.point import Point
from paceline.lab.results import MeasuredTarget, Results
from paceline.lab.search import Probe, SearchResult
from paceline.lab.slo import parse_constraints
from paceline.lab.statistics import difference_interval, wilson


def engine(name: str, slower: float = 1.0, *, seed: int = 0, stage: str = "rate=3", count: int = 600) -> Point:
    """TTFT about 100 ms, TPOT about 10 ms, times ``slower``."""
    draw = random.Random(f"{name} {seed}")
    records = [
        steady(id, id / 3, ttft=slower * draw.gauss(0.1, 0.02), tpot=slower * draw.gauss(0.01, 0.001))
        for id in range(count)
    ]
    log = log_of(records, load={"kind": "constant"}, offered_rate=3.0, client={})
    return replace(measure(log, parse_constraints("ttft_p99 < 150ms")), name=stage, target=name)


def run(*points: Point, searches: list[SearchResult] | None = None) -> Results:
    names = dict.fromkeys(point.target for point in points)
    targets = [MeasuredTarget(name=name, url="http://127.0.0.1:8000", model="model") for name in names]
    return Results(experiment="e", started_at="", targets=targets, points=list(points), searches=searches or [])


def row(found: list[Difference], metric: str) -> Difference:
    return next(item for item in found if item.metric == metric)


@pytest.mark.parametrize("seed", range(5))
def test_the_same_engine_twice_is_indistinguishable(seed: int) -> None:
    found = compare(run(engine("a", seed=seed)), run(engine("a", seed=seed + 100)))
    outcomes = [item.outcome for item in found if item.metric in ("ttft_s.mean", "tpot_s.mean", "e2e_s.p50")]
    assert outcomes.count("indistinguishable") >= 2  # one in twenty differs by chance
    assert row(found, "attainment").method == "Newcombe"


def test_a_slower_engine_is_worse() -> None:
    found = compare(run(engine("a")), run(engine("b", 1.2)))
    for metric in ("ttft_s.mean", "ttft_s.p50", "tpot_s.mean", "itl_s.mean", "e2e_s.p50", "itl_s.p90"):
        item = row(found, metric)
        assert (item.a_target, item.b_target, item.stage, item.outcome) == ("a", "b", "rate=3", "worse")
        assert item.change == pytest.approx(1.2, rel=0.06)
        assert item.interval is not None
        assert 1 < item.interval[0] < item.change < item.interval[1]
    assert row(compare(run(engine("b", 1.2)), run(engine("a"))), "ttft_s.mean").outcome == "better"


def test_attainment_is_compared_by_newcombe() -> None:
    a, b = engine("a"), engine("b", 1.2)
    item = row(compare(run(a), run(b)), "attainment")
    assert a.attainment is not None
    assert b.attainment is not None
    assert item.change == pytest.approx(b.attainment - a.attainment)
    of = [(p.attainment, wilson(p.attainment or 0, p.effective_requests or 0)) for p in (a, b)]
    assert item.interval == pytest.approx(difference_interval(*of[0], *of[1]))  # type: ignore[arg-type]
    assert item.outcome == "worse"
    other = replace(b, constraints={"ttft_p99 < 2s": True})
    item = row(compare(run(a), run(other)), "attainment")
    assert (item.outcome, item.method, item.change) == ("unknown", "other constraints", None)


def closed(name: str, slower: float = 1.0, *, count: int = 200) -> Point:
    """Four seats, a request a second each, times ``slower``, give or take a tenth."""
    draw, ends, records = random.Random(name), [0.0] * 4, []
    for id in range(count):
        due, duration = ends[id % 4], slower * draw.uniform(0.9, 1.1)
        ends[id % 4] += duration
        records.append(steady(id, due, ttft=duration / 4, tpot=duration / 12, tokens=10))
    point = measure(log_of(records, load={"kind": "concurrency", "batch": 4}, batch=4, client={}))
    return replace(point, name="batch=4", target=name)


@pytest.mark.parametrize(
    ("slower", "outcome"), [(1.0, "indistinguishable"), (1.005, "indistinguishable"), (1.1, "worse"), (0.9, "better")]
)
def test_throughput_of_single_runs(slower: float, outcome: str) -> None:
    item = row(compare(run(closed("a")), run(closed("b", slower))), "output_tokens_per_s")
    assert (item.outcome, item.method) == (outcome, "spans of time")
    assert item.change == pytest.approx(1 / slower, rel=0.02)
    assert item.interval is not None
    assert item.interval[1] / item.interval[0] < 1.1


def test_throughput_of_a_run_that_is_too_short_is_unknown() -> None:
    item = row(compare(run(closed("a")), run(closed("b", 1.2, count=12))), "output_tokens_per_s")
    assert item.change is not None
    assert (item.interval, item.outcome) == (None, "unknown")
    assert "repeats" in item.method


def repeats(name: str, values: list[float]) -> list[Point]:
    base = engine(name, stage="128x128", count=300)
    return [
        replace(base, name="128x128" + (f" #{place}" if place > 1 else ""), output_tokens_per_s=value)
        for place, value in enumerate(values, 1)
    ]


def test_repeats_are_compared_by_welch() -> None:
    a, b = [100.0, 110.0, 105.0], [150.0, 140.0, 145.0]
    item = row(compare(run(*repeats("a", a)), run(*repeats("b", b))), "output_tokens_per_s")
    assert item.method == "Welch, of the repeats"
    assert item.change == pytest.approx((math.prod(b) / math.prod(a)) ** (1 / 3))
    assert item.outcome == "better"
    assert item.interval is not None
    assert item.interval[0] < item.change < item.interval[1]
    noisy = [100.0, 140.0, 110.0]
    item = row(compare(run(*repeats("a", noisy)), run(*repeats("b", [105.0, 145.0, 120.0]))), "output_tokens_per_s")
    assert item.outcome == "indistinguishable"


def test_a_repeat_of_zero_has_no_ratio() -> None:
    item = row(compare(run(*repeats("a", [100, 0])), run(*repeats("a", [90, 110]))), "output_tokens_per_s")
    assert (item.a, item.change, item.outcome, item.method) == (50, None, "unknown", "no ratio of 0")


def test_invalid_points_are_shown_and_decide_nothing() -> None:
    bad = replace(engine("b", 1.2), valid=False, reasons=["lateness: ..."])
    found = compare(run(engine("a")), run(bad))
    assert {item.outcome for item in found} == {"unknown"}
    assert {item.method for item in found} == {"no valid point"}
    assert row(found, "ttft_s.mean").b == bad.ttft_s.mean
    both = compare(run(engine("a")), run(bad, replace(engine("b"), name="rate=3 #2")))
    assert row(both, "ttft_s.mean").outcome == "indistinguishable"


def test_not_measured_is_unknown() -> None:
    single = replace(engine("b"), tpot_s=measure(log_of([])).tpot_s, intervals={})
    item = row(compare(run(engine("a")), run(single)), "tpot_s.mean")
    assert (item.b, item.change, item.outcome, item.method) == (None, None, "unknown", "not measured")


def asking(load: dict[str, Any] | None = None, **workload: Any) -> Point:
    plan = {"kind": "fixed", "input": 2048, "output": 128, "requests": 600} | workload
    return replace(
        engine("a"), load={"kind": "poisson", "rate": 3.0, "ignore_eos": True, "workload": plan} | (load or {})
    )


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (asking(input=128), "workload input 2048 and 128"),
        (asking(kind="chat", path="/b/x.jsonl"), "workload kind fixed and chat, workload path none and x.jsonl"),
        (asking({"rate": 4.0}), "rate 3.0 and 4.0"),
        (asking({"kind": "gamma", "cv": 2.0}), "kind poisson and gamma, cv none and 2.0"),
        (asking({"ignore_eos": False}), "ignore_eos True and False"),
        (asking({"kind": "burst"}, requests=9), "kind poisson and burst, workload requests none and 9"),
    ],
)
def test_other_workloads_are_not_compared(other: Point, why: str) -> None:
    found = compare(run(asking()), run(other))
    assert {(item.outcome, item.interval, item.change) for item in found} == {("unknown", None, None)}
    assert {item.method for item in found} == {f"not the same load: {why}"}
    assert row(found, "ttft_s.mean").a is not None


def test_what_does_not_make_another_workload() -> None:
    one = asking(path="/a/x.jsonl")
    for other in (asking(path="/b/x.jsonl"), asking(path="x.jsonl", requests=900), asking(path="x.jsonl", seed=4)):
        assert row(compare(run(one), run(other)), "output_tokens_per_s").outcome == "indistinguishable"
    unknown = replace(one, load={"kind": "poisson", "rate": 3.0})
    assert row(compare(run(one), run(unknown)), "ttft_s.mean").outcome == "indistinguishable"


def test_the_rate_of_a_single_run_holds_for_its_own_arrivals_only() -> None:
    found = compare(run(asking()), run(asking({"seed": 1})))
    for metric in ("output_tokens_per_s", "requests_per_s", "goodput_rps"):
        assert (row(found, metric).interval, row(found, metric).method) == (None, "single runs with other arrivals")
    assert row(found, "ttft_s.mean").outcome == "indistinguishable"


def test_searches_with_other_workloads_are_not_compared() -> None:
    more_of_it: dict[str, Any] = {"verdict": "kept", "passes": True, "attainment": 1.0, "interval": None}
    ten, twenty = (Probe(load=load, points=["rate=3"], **more_of_it) for load in (10.0, 20.0))
    one = run(asking(), searches=[replace(search(10, 9, 11), probes=[ten])])
    more = run(asking({"rate": 9.0}), searches=[replace(search(13, 12, 14), probes=[twenty])])
    longer = run(asking(input=99), searches=[replace(search(13, 12, 14), probes=[ten])])
    assert row(compare(one, more), "highest rate").outcome == "better"
    item = row(compare(one, longer), "highest rate")
    assert (item.outcome, item.change, item.interval) == ("unknown", None, None)
    assert item.method == "not the same load: workload input 2048 and 99"


def test_pairs() -> None:
    two = run(engine("a"), engine("b", 1.2))
    assert {(item.a_target, item.b_target) for item in compare(two, two)} == {("a", "a"), ("b", "b")}
    assert row(compare_targets(two, "a", two, "b"), "ttft_s.mean").outcome == "worse"
    with pytest.raises(NothingToCompare, match="no engine is in both runs: a, b and c"):
        compare(two, run(engine("c")))
    with pytest.raises(NothingToCompare, match="no stage in common"):
        compare(run(engine("a")), run(engine("a", stage="rate=5")))


def search(load: float | None, kept: float | None, broken: float | None) -> SearchResult:
    more: dict[str, Any] = {"verdict": None, "ended": "edge", "probes": [], "target": "a"}
    return SearchResult(over="rate", attainment=0.99, load=load, kept=kept, broken=broken, **more)


@pytest.mark.parametrize(
    ("a", "b", "outcome", "interval"),
    [
        ((10, 9, 11), (13, 12, 14), "better", (12 / 11, 14 / 9)),
        ((13, 12, 14), (10, 9, 11), "worse", (9 / 14, 11 / 12)),
        ((10, 9, 11), (10.5, 9.5, 12), "indistinguishable", (9.5 / 11, 12 / 9)),
        ((10, 9, 11), (20, 20, None), "better", None),
        ((None, None, 1), (5, None, None), "unknown", None),
    ],
)
def test_highest_loads(
    a: tuple[float, float, float],
    b: tuple[float, float, float],
    outcome: str,
    interval: tuple[float, float] | None,
) -> None:
    one, other = run(engine("a"), searches=[search(*a)]), run(engine("a"), searches=[search(*b)])
    item = row(compare(one, other), "highest rate")
    assert (item.outcome, item.interval) == (outcome, interval and pytest.approx(interval))
    assert (item.a, item.b) == (a[0], b[0])
