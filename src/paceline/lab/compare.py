"""Two runs or two engines, stage by stage: what differs, and by more than the noise."""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from paceline.lab.point import Point, Statistics
from paceline.lab.results import Results
from paceline.lab.search import SearchResult, judge
from paceline.lab.statistics import Interval, difference_interval, welch

Outcome = Literal["better", "worse", "indistinguishable", "unknown"]
"""Of B against A. ``indistinguishable``: the interval holds 1 (of a difference 0). ``unknown``: there is none."""

RATES = ("output_tokens_per_s", "requests_per_s", "goodput_rps")
JUDGED = ("goodput_rps", "attainment")
LATENCIES = ("ttft_s", "tpot_s", "itl_s", "e2e_s")
STATISTICS = tuple(item.name for item in fields(Statistics) if item.name != "max")


class NothingToCompare(ValueError):
    """Two runs that have no engine or no stage in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One figure of one stage, or of one search, of A and of B."""

    a_target: str
    b_target: str
    stage: str
    metric: str
    """``output_tokens_per_s``, ``ttft_s.p99``, ``attainment``; of a search ``highest rate`` or ``highest batch``."""
    a: float | None
    b: float | None
    change: float | None
    """b / a; of the attainment b - a. For throughput this is the speed-up."""
    interval: Interval | None
    """95% confidence interval of the change."""
    outcome: Outcome
    method: str
    """How the interval was made, or why there is none."""


def compare(a: Results, b: Results) -> list[Difference]:
    """Compares two runs. Engines of one name are paired; where each run has but one, these two are.

    Raises:
        NothingToCompare: no engines can be paired, or they share no stage.
    """
    names_a, names_b = [target.name for target in a.targets], [target.name for target in b.targets]
    pairs = [(name, name) for name in names_a if name in names_b]
    if not pairs and len(names_a) == len(names_b) == 1:
        pairs = [(names_a[0], names_b[0])]
    if not pairs:
        raise NothingToCompare(f"no engine is in both runs: {', '.join(names_a)} and {', '.join(names_b)}")
    found: list[Difference] = []
    for one, other in pairs:
        found += compare_targets(a, one, b, other)
    if not found:
        stages = [", ".join(dict.fromkeys(point.name for point in run.points)) or "none" for run in (a, b)]
        raise NothingToCompare(f"the two runs have no stage in common: {stages[0]}, and {stages[1]}")
    return found


def compare_targets(a: Results, a_target: str, b: Results, b_target: str) -> list[Difference]:
    """Compares two engines, of one run or of two, on the stages that both have."""
    ours, theirs = _stages(a.points, a_target), _stages(b.points, b_target)
    found = []
    for stage in ours:
        if stage in theirs:
            found += _compare_stage(stage, a_target, ours[stage], b_target, theirs[stage])
    for one in a.searches:
        for other in b.searches:
            same = (one.over, one.attainment, one.constraints) == (other.over, other.attainment, other.constraints)
            if same and (one.target, other.target) == (a_target, b_target):
                found.append(_compare_searches(one, other, _unlike(_probed(a, one), _probed(b, other))))
    return found


def _probed(run: Results, search: SearchResult) -> list[Point]:
    """One point of the search, with the workload only: each search goes to loads of its own."""
    names = {name for probe in search.probes for name in probe.points}
    of_search = (point for point in run.points if point.target == search.target and point.name in names)
    return [replace(point, load={**point.load, search.over: None}) for point in of_search][:1]


def _stages(points: Sequence[Point], target: str) -> dict[str, list[Point]]:
    """Points by stage; a repeat has the stage's name and `` #2`` behind it."""
    found = defaultdict(list)
    for point in points:
        if point.target == target:
            found[re.sub(r" #\d+$", "", point.name)].append(point)
    return found


def _compare_stage(
    stage: str, a_target: str, a: Sequence[Point], b_target: str, b: Sequence[Point]
) -> list[Difference]:
    found = []
    valid_a, valid_b = [point for point in a if point.valid], [point for point in b if point.valid]
    other_load = _unlike(valid_a, valid_b)
    for metric in (*RATES, "attainment", *(f"{latency}.{name}" for latency in LATENCIES for name in STATISTICS)):
        values_a, values_b = _values(valid_a or a, metric), _values(valid_b or b, metric)
        if not values_a and not values_b:
            continue
        one, other = _mean(values_a), _mean(values_b)
        change: float | None = None
        interval: Interval | None = None
        if not valid_a or not valid_b:
            method = "no valid point"
        elif one is None or other is None:
            method = "not measured"
        elif other_load:
            method = other_load
        elif metric in JUDGED and _constraints(a) != _constraints(b):
            method = "other constraints"
        elif metric == "attainment":
            of_a, of_b = _attainment(valid_a), _attainment(valid_b)
            one, other, change = of_a[0], of_b[0], of_b[0] - of_a[0]
            interval, method = difference_interval(*of_a, *of_b), "Newcombe"
        elif min(*values_a, *values_b) <= 0:
            method = "no ratio of 0"
        else:
            change = other / one
            interval, method = _ratio_interval(valid_a, valid_b, metric)
        outcome = _outcome(interval, 0.0 if metric == "attainment" else 1.0, metric in (*RATES, "attainment"))
        found.append(
            Difference(
                a_target=a_target,
                b_target=b_target,
                stage=stage,
                metric=metric,
                a=one,
                b=other,
                change=change,
                interval=interval,
                outcome=outcome,
                method=method,
            )
        )
    return found


def _value(point: Point, metric: str) -> float | None:
    name, _, statistic = metric.partition(".")
    found = getattr(point, name)
    value: float | None = getattr(found, statistic) if statistic else found
    return value


def _values(points: Sequence[Point], metric: str) -> list[float]:
    return [value for point in points if (value := _value(point, metric)) is not None]


def _mean(values: Sequence[float]) -> float | None:
    """Of the repeats: geometric, as ratios are compared; arithmetic where one is 0."""
    if not values:
        return None
    if len(values) == 1 or min(values) <= 0:
        return float(np.mean(values))
    return math.exp(float(np.mean(np.log(values))))


def _ratio_interval(a: Sequence[Point], b: Sequence[Point], metric: str) -> tuple[Interval | None, str]:
    values_a, values_b = _values(a, metric), _values(b, metric)
    if min(len(values_a), len(values_b)) >= 2:
        low, high = welch(np.log(values_a), np.log(values_b))
        return (math.exp(low), math.exp(high)), "Welch, of the repeats"
    logs = []
    for points in (a, b):
        point = next(point for point in points if _value(point, metric) is not None)
        value, interval = _value(point, metric), point.intervals.get(metric)
        if metric in RATES and _arrivals(a[0]) != _arrivals(b[0]):
            return None, "single runs with other arrivals"
        if len(points) > 1 or value is None or interval is None or interval[0] <= 0:
            return None, "too few requests or repeats for an interval"
        logs.append((math.log(value), (math.log(interval[0]), math.log(interval[1]))))
    low, high = difference_interval(*logs[0], *logs[1])
    return (math.exp(low), math.exp(high)), "spans of time" if metric in RATES else "blocks of requests"


STEADY = ("constant", "poisson", "gamma", "concurrency")
"""Loads whose figures mean the same however many requests there are."""


def _asked(point: Point) -> dict[str, Any]:
    """What the stage asks of an engine, one entry a key: not its random numbers, nor where a file lies."""
    found: dict[str, Any] = {}
    for key, value in point.load.items():
        if key == "workload":
            found |= {f"workload {name}": part for name, part in value.items()}
        else:
            found[key] = value
    dropped = {"seed", "workload seed"} | ({"workload requests"} if point.load.get("kind") in STEADY else set())
    return {
        key: Path(value).name if key == "workload path" and isinstance(value, str) else value
        for key, value in found.items()
        if key not in dropped
    }


def _unlike(a: Sequence[Point], b: Sequence[Point]) -> str:
    """In which keys the loads or workloads of two stages differ; empty where they do not, as far as it is known."""
    for one in a:
        for other in b:
            ours, theirs = _asked(one), _asked(other)
            keys = dict.fromkeys([*ours, *theirs])
            if "ignore_eos" not in one.load or "ignore_eos" not in other.load:
                keys.pop("ignore_eos", None)
            if "workload" not in one.load or "workload" not in other.load:
                keys = {key: None for key in keys if not key.startswith("workload ")}
            if wrong := [key for key in keys if ours.get(key) != theirs.get(key)]:
                values = (f"{key} {ours.get(key, 'none')} and {theirs.get(key, 'none')}" for key in wrong)
                return f"not the same load: {', '.join(values)}"
    return ""


def _arrivals(point: Point) -> tuple[Any, ...]:
    """What makes the times of two open loads of one kind and rate differ; the same for all others."""
    if point.offered_rate is None:
        return ()
    return point.load.get("seed", 0), point.requests.ok + point.requests.failed


def _constraints(points: Sequence[Point]) -> set[str]:
    return {text for point in points for text in point.constraints}


def _attainment(points: Sequence[Point]) -> tuple[float, Interval]:
    """Of all requests of the points, and its interval."""
    probe = judge(0, points, 1.0)
    assert probe.attainment is not None
    assert probe.interval is not None
    return probe.attainment, probe.interval


def _outcome(interval: Interval | None, same: float, more_is_better: bool) -> Outcome:
    if interval is None:
        return "unknown"
    if interval[0] <= same <= interval[1]:
        return "indistinguishable"
    return "better" if (interval[0] > same) == more_is_better else "worse"


def _compare_searches(a: SearchResult, b: SearchResult, other_load: str) -> Difference:
    """The edge of each lies between the highest load kept and the lowest broken; where these overlap none is better."""
    outcome: Outcome = "indistinguishable"
    if b.kept is not None and a.broken is not None and b.kept >= a.broken:
        outcome = "better"
    elif a.kept is not None and b.broken is not None and a.kept >= b.broken:
        outcome = "worse"
    elif a.load is None or b.load is None:
        outcome = "unknown"
    interval = None
    if other_load:
        outcome = "unknown"
    elif a.kept is not None and a.broken is not None and b.kept is not None and b.broken is not None:
        interval = b.kept / a.broken, b.broken / a.kept
    return Difference(
        a_target=a.target,
        b_target=b.target,
        stage="search",
        metric=f"highest {a.over}",
        a=a.load,
        b=b.load,
        change=None if a.load is None or b.load is None or other_load else b.load / a.load,
        interval=interval,
        outcome=outcome,
        method=other_load or "kept and broken loads",
    )
