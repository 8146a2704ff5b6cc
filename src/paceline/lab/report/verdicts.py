"""What a report's reader wants to know first, in sentences."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

from paceline.lab.capacity import Capacity, broken_by, capacity, capacity_found, keeps, load, saturated, value_of
from paceline.lab.compare import Difference, compare_targets
from paceline.lab.point import Point
from paceline.lab.report.curves import Panel
from paceline.lab.report.engines import Engine
from paceline.lab.report.text import duration, listing, number
from paceline.lab.results import Results
from paceline.lab.search import SearchResult
from paceline.lab.slo import Constraint

UNITS = {"rate": "requests/s", "batch": "requests at once"}


@dataclass(frozen=True, slots=True)
class Verdict:
    kind: Literal["kept", "broken", "neutral"]
    about: str
    """The engine or stage; the sentence goes on from it."""
    text: str


@dataclass(frozen=True, slots=True)
class Span:
    """The limit of an engine lies between these two loads; ``high`` is infinite where no load broke."""

    engine: str
    low: float
    high: float
    best: Point | None
    """At the highest load kept."""


def verdicts(panel: Panel, engines: Sequence[Engine], constraints: Sequence[Constraint]) -> list[Verdict]:
    """For each engine the highest load that keeps the constraints, then how engines compare.

    Where a search looked for that load its answer stands, since it weighs repeated points.
    """
    if panel.axis == "stage":
        return _of_stages(panel, engines, constraints)
    unit = UNITS[panel.axis]
    if not constraints:
        return [_throughput(engine, points, unit) for engine, points in panel.curves.items()]
    found, spans = [], []
    for engine, points in panel.curves.items():
        reach = capacity(points, constraints)
        search = _search(engine, panel, engines)
        if search is not None and search.load is not None:
            found.append(_of_search(engine, search, constraints, unit))
            low = search.load if search.kept is None else search.kept
            high = inf if search.broken is None else search.broken
            spans.append(Span(engine, low, high, capacity_found(points, search).best))
        else:
            found.append(_of_capacity(engine, reach, points, constraints, unit))
            if reach.best is not None:
                spans.append(Span(engine, *reach.span, reach.best))
    return found + comparisons(spans, unit)


def _search(engine: str, panel: Panel, engines: Sequence[Engine]) -> SearchResult | None:
    """A search over the panel's loads. With several workloads there is no telling which one it searched."""
    if panel.workload:
        return None
    searches = next((item.searches for item in engines if item.name == engine), [])
    return next((item for item in searches if item.over == panel.axis), None)


def comparisons(spans: Sequence[Span], unit: str) -> list[Verdict]:
    """Of the best engine with each other one. They are told apart only if one broke at a load that the other keeps."""
    ordered = sorted(spans, key=lambda span: (span.low, span.high), reverse=True)
    return [_comparison(ordered[0], less, unit) for less in ordered[1:]]


def _comparison(more: Span, less: Span, unit: str) -> Verdict:
    limits = f"the limit of {more.engine} lies {_between(more)} {unit}, that of {less.engine} {_between(less)}"
    if less.high <= more.low:
        least = f"{more.low / less.high:.2f}"
        ratio = f"at least {least}x" if more.high == inf else f"{least}x to {more.high / less.low:.2f}x"
        text = f"differ: {more.engine} takes {ratio} the load; {limits}."
    elif less.high == inf:
        text = f"are not told apart: no valid load was high enough to break {less.engine}."
    else:
        text = f"are indistinguishable in load: {limits}."
    made = [span.best and span.best.output_tokens_per_s for span in (more, less)]
    if unit == UNITS["batch"] and made[0] and made[1]:
        text += (
            f" At the highest load that each keeps {more.engine} makes {number(made[0])} output tokens/s and "
            f"{less.engine} {number(made[1])} "
            f"({made[0] / made[1]:.2f}x)."
        )
    return Verdict("neutral", f"{more.engine} and {less.engine}", text)


def _between(span: Span) -> str:
    return f"above {number(span.low)}" if span.high == inf else f"between {number(span.low)} and {number(span.high)}"


def _of_search(engine: str, search: SearchResult, constraints: Sequence[Constraint], unit: str) -> Verdict:
    text = f"keeps {_names(constraints)} for {search.attainment:.0%} of the requests up to {number(search.load)} {unit}"
    if search.ended == "all kept":
        text += ", the highest tried: no load was high enough to break them"
    elif search.broken is not None:
        text += f"; {number(search.broken)} breaks"
    if search.verdict == "indistinguishable":
        text += ". It is indistinguishable from a load that breaks" + (
            f"; surely kept is {number(search.kept)}" if search.kept is not None else ""
        )
    return Verdict("kept", engine, ". ".join([text, *search.notes]) + ".")


def _of_capacity(
    engine: str, reach: Capacity, points: Sequence[Point], constraints: Sequence[Constraint], unit: str
) -> Verdict:
    if not reach.valid:
        return _unknown(engine, points)
    if reach.best is None:
        assert reach.broken is not None
        at = f"{number(load(reach.broken))} {unit}"
        return Verdict(
            "broken",
            engine,
            f"keeps {_names(constraints)} at no load measured: at {at} {breach(reach.broken, constraints)}.",
        )
    best = reach.best
    text = f"keeps {_names(constraints)} up to {number(load(best))} {unit} ({_rates(best)})"
    if reach.broken is None:
        text += ", the highest valid load measured: none was high enough to break them"
    else:
        text += f"; at {number(load(reach.broken))} {breach(reach.broken, constraints)}"
    if reach.kept_above is not None:
        text += f". It kept them at {number(load(reach.kept_above))} again: noise, so repeat these points"
    return Verdict("kept", engine, text + ".")


def _of_stages(panel: Panel, engines: Sequence[Engine], constraints: Sequence[Constraint]) -> list[Verdict]:
    """For each stage the throughput of each engine beside that of the first, and whether it keeps the constraints."""
    by_name = {engine.name: engine for engine in engines}
    runs = {name: _throughputs(by_name[name], points) for name, points in panel.curves.items()}
    (first, base), *others = runs.items()
    changes = {
        (other, item.stage): item
        for other, run in others
        for item in compare_targets(base, first, run, other)
        if item.metric == "output_tokens_per_s"
    }
    found = []
    for stage in dict.fromkeys(point.name for point in panel.points):
        points = {engine: p for engine, curve in panel.curves.items() for p in curve if p.name == stage}
        words = [_of_stage(engine, p, changes.get((engine, stage)), constraints) for engine, p in points.items()]
        kept = [point.valid and keeps(point, constraints) for point in points.values()]
        good: Literal["kept", "neutral"] = "kept" if constraints else "neutral"
        found.append(Verdict(good if all(kept) else "broken", f"{stage}:", "; ".join(words) + "."))
    return found


def _throughputs(engine: Engine, points: Sequence[Point]) -> Results:
    """A run of these points, for a comparison that is of throughput alone."""
    own = [replace(point, target=engine.name, attainment=None) for point in points]
    return replace(engine.results, points=own, searches=[])


def _of_stage(engine: str, point: Point, change: Difference | None, constraints: Sequence[Constraint]) -> str:
    if not point.valid:
        return f"{engine} is not valid ({_first_reason([point])})"
    text = f"{engine} {number(point.output_tokens_per_s)} output tokens/s"
    if change is not None and change.change is not None:
        noise = {"unknown": ", of single runs", "indistinguishable": ", indistinguishable"}.get(change.outcome, "")
        text += f" ({change.change:.2f}x of {change.a_target}{noise})"
    if not constraints:
        return text
    return text + (f", keeps {_names(constraints)}" if keeps(point, constraints) else f", {breach(point, constraints)}")


def _throughput(engine: str, points: Sequence[Point], unit: str) -> Verdict:
    measured = [point for point in points if point.valid and point.output_tokens_per_s is not None]
    if not measured:
        return _unknown(engine, points)
    best = max(measured, key=lambda point: point.output_tokens_per_s or 0.0)
    return Verdict(
        "neutral",
        engine,
        f"{number(best.output_tokens_per_s)} output tokens/s at {number(load(best))} {unit}, the most of its "
        f"{len(measured)} valid points. No constraint was set.",
    )


def _unknown(engine: str, points: Sequence[Point]) -> Verdict:
    return Verdict("broken", engine, f"has no verdict, for none of its points is valid ({_first_reason(points)}).")


def breach(point: Point, constraints: Sequence[Constraint]) -> str:
    """``TTFT p99 is 1.4 s, over the limit of 1 s``. Of several the worst; not for a point that keeps all."""
    broken = broken_by(point, constraints)
    measured = [(value, constraint) for constraint in broken if (value := value_of(point, constraint)) is not None]
    if measured:
        value, worst = max(measured, key=lambda pair: pair[0] / pair[1].limit_s)
        name = f"{worst.metric.upper()} {worst.statistic}"
        return f"{name} is {duration(value)}, over the limit of {duration(worst.limit_s)}"
    if broken:
        return _unknown_value(point, broken[0])
    assert saturated(point)
    return "requests came faster than they were answered: it is saturated"


def _unknown_value(point: Point, constraint: Constraint) -> str:
    """Of a constraint that is not kept though no value is over its limit."""
    name, failed = f"{constraint.metric.upper()} {constraint.statistic}", point.requests.failed
    of_some = constraint.value_of(getattr(point, f"{constraint.metric}_s"))
    if of_some is None:
        return f"{name} could not be measured" + (f": all {failed} requests failed" if not point.requests.ok else "")
    without = f"{failed} of {point.requests.ok + failed} requests failed" if failed else "some replies have none"
    return f"{name} is {duration(of_some)} where it was measured, but {without}, and counting them too few keep it"


def _names(constraints: Sequence[Constraint]) -> str:
    return listing([constraint.text for constraint in constraints])


def _rates(point: Point) -> str:
    words = [] if point.goodput_rps is None else [f"goodput {number(point.goodput_rps)} requests/s"]
    return ", ".join([*words, f"{number(point.output_tokens_per_s)} output tokens/s"])


def _first_reason(points: Sequence[Point]) -> str:
    return next((point.reasons[0] for point in points if point.reasons), "no reason is given")
