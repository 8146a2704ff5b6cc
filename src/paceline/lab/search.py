"""Looks for the highest load at which enough requests keep the constraints.

From the lowest load upwards it doubles until a load does not pass, then halves the interval between (rates by their
ratio). At the end it measures both sides of the edge again: at least twice, and on until their intervals tell them from
the share asked for or the repeats are used up. Nothing is kept between the steps but what was measured, so a repeat
that turns a load around moves the edge, and the search goes on from there. Attainment need not fall with the load: the
answer lies below every load that does not pass. What stages are left repeat the loads below an answer that could not be
told from the edge, from the highest on, until one is surely kept.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from paceline.lab.point import Point
from paceline.lab.statistics import Interval, wilson

Verdict = Literal["kept", "broken", "indistinguishable", "invalid"]
"""Of a load. ``kept``: the confidence interval of its attainment lies at or above the share asked for. ``broken``: it
lies below, or the load saturates the engine. ``indistinguishable``: it holds the share, or one run was kept and another
broken or saturated the engine. ``invalid``: no valid point.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One load and all that was measured at it."""

    load: float
    """Requests a second, or batch size."""
    verdict: Verdict
    passes: bool
    """Whether the attainment of the median run is at least the share asked for, and fewer than half of the runs
    saturate the engine."""
    attainment: float | None
    """Of the requests of all valid points; None where there is none."""
    interval: tuple[float, float] | None
    """95% confidence interval (Wilson) of the attainment."""
    points: list[str]
    """Their names, in the order of measurement, invalid ones too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What a search found."""

    over: Literal["rate", "batch"]
    target: str = ""
    constraints: list[str] = field(default_factory=list)
    attainment: float
    """Share of the requests that must keep every constraint."""
    load: float | None
    """The answer: the highest load that passes, of those below every load that does not. None: not even the lowest."""
    verdict: Verdict | None
    """Of that load: ``kept``, or ``indistinguishable`` where the measurements cannot tell it from one that breaks."""
    kept: float | None
    """The highest load up to the answer whose verdict is ``kept``."""
    broken: float | None
    """The lowest load above the answer whose verdict is ``broken``. The edge lies between ``kept`` and it."""
    ended: Literal["edge", "all kept", "none kept", "stages", "invalid"]
    """Why the search ended. ``edge``: the loads on its two sides, as measured, differ by no more than the tolerance;
    how far noise may have moved it say ``kept`` and ``broken``. ``all kept``: the highest load passes. ``none
    kept``: the lowest does not. ``stages``: they are used up. ``invalid``: the load next to the answer has no valid
    point, so the edge may lie above it."""
    probes: list[Probe]
    """By load."""
    notes: list[str] = field(default_factory=list)


def find_rate(
    measure_at: Callable[[float], Point],
    low: float,
    high: float,
    *,
    attainment: float = 0.99,
    tolerance: float = 0.05,
    repeats: int = 3,
    max_stages: int = 20,
) -> SearchResult:
    """Finds the highest rate from ``low`` to ``high``, in requests a second.

    Args:
        measure_at: Measures one stage at a rate, with constraints. Called again for a rate it must draw new arrivals.
        low: Measured first.
        high: Never exceeded.
        attainment: Share of the requests that must keep every constraint.
        tolerance: The edge is known once the loads on its two sides differ by no more than this share.
        repeats: At most so many measurements of one rate.
        max_stages: At most so many measurements in all.

    Raises:
        ValueError: an argument is out of its range, or a point was measured without constraints.
    """
    return _Search(measure_at, "rate", low, high, attainment, tolerance, repeats, max_stages).run()


def find_batch(
    measure_at: Callable[[int], Point],
    low: int,
    high: int,
    *,
    attainment: float = 0.99,
    tolerance: float = 0.05,
    repeats: int = 3,
    max_stages: int = 20,
) -> SearchResult:
    """As `find_rate`, for the largest batch: loads are whole numbers, and neighbours are always close enough."""
    return _Search(
        lambda load: measure_at(int(load)), "batch", low, high, attainment, tolerance, repeats, max_stages
    ).run()


def judge(load: float, points: Sequence[Point], attainment: float) -> Probe:
    """What the points measured at one load say of it together; invalid points say nothing.

    Raises:
        ValueError: a valid point was measured without constraints.
    """
    names = [point.name for point in points]
    valid = [point for point in points if point.valid]
    if not valid:
        return Probe(load=load, verdict="invalid", passes=False, attainment=None, interval=None, points=names)
    shares = [_share(point) for point in valid]
    sizes = [point.requests.ok + point.requests.failed for point in valid]
    worth = sum(point.effective_requests or 0.0 for point in valid)
    pooled = sum(share * size for share, size in zip(shares, sizes, strict=True)) / sum(sizes)
    interval = wilson(pooled, worth)
    full = sum(any(note.startswith("saturated") for note in point.notes) for point in valid)
    saturated = 2 * full > len(valid)
    runs = {
        _verdict(wilson(share, p.effective_requests or 0.0), attainment) for share, p in zip(shares, valid, strict=True)
    }
    verdict = "broken" if saturated else _verdict(interval, attainment)
    # Shares are quotients of counts: 99 of 100 pass at 0.99.
    passes = 2 * full < len(valid) and median(shares) >= attainment - 1e-9
    disagree = {"kept", "broken"} <= runs or (verdict == "kept" and (full or not passes))
    disagree = disagree or (verdict == "broken" and passes)
    if disagree and not saturated:
        verdict = "indistinguishable"
    return Probe(load=load, verdict=verdict, passes=passes, attainment=pooled, interval=interval, points=names)


def _share(point: Point) -> float:
    if point.attainment is None:
        raise ValueError(f"{point.name} was measured without constraints")
    return point.attainment


def _verdict(interval: Interval, attainment: float) -> Verdict:
    if interval[1] < attainment:
        return "broken"
    return "kept" if interval[0] >= attainment else "indistinguishable"


@dataclass
class _Search:
    measure_at: Callable[[float], Point]
    over: Literal["rate", "batch"]
    low: float
    high: float
    attainment: float
    tolerance: float
    repeats: int
    max_stages: int
    measured: dict[float, list[Point]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high < math.inf:
            raise ValueError(f"the loads must be 0 < low <= high, not {self.low:g} and {self.high:g}")
        if not 0 < self.attainment <= 1:
            raise ValueError(f"attainment must be above 0 and at most 1, not {self.attainment:g}")
        if not 0 < self.tolerance < 1:
            raise ValueError(f"tolerance must be between 0 and 1, not {self.tolerance:g}")
        if self.repeats < 1 or self.max_stages < 1:
            raise ValueError("repeats and max_stages must be at least 1")

    def run(self) -> SearchResult:
        ended: Literal["edge", "all kept", "none kept", "stages", "invalid"] = "stages"
        for _ in range(self.max_stages):
            load = self._next() or self._unproven()
            if load is None:
                break
            self.measured[load].append(self.measure_at(load))
        below, above = self._edge()
        if self._next() is None:
            if above is None:
                ended = "all kept"
            elif above.verdict == "invalid":
                ended = "invalid"
            else:
                ended = "edge" if below else "none kept"
        return self._result(below, above, ended)

    def _probes(self) -> list[Probe]:
        return [judge(load, points, self.attainment) for load, points in sorted(self.measured.items())]

    def _edge(self) -> tuple[Probe | None, Probe | None]:
        """The highest load that passes below all that do not, and the lowest of those."""
        below = None
        for probe in self._probes():
            if not probe.passes:
                return below, probe
            below = probe
        return below, None

    def _next(self) -> float | None:
        """The load to measure now; None when the edge is known."""
        below, above = self._edge()
        if below is None:
            return self.low if above is None else self._again(above)
        if above is None:
            return self._again(below) if below.load >= self.high else min(2 * below.load, self.high)
        return self._between(below.load, above.load) or self._again(below) or self._again(above)

    def _unproven(self) -> float | None:
        """The highest load above the highest ``kept`` one that passes, while repeats could show that it is kept too."""
        below, _ = self._edge()
        for probe in reversed(self._probes()):
            if below is not None and probe.load <= below.load:
                if probe.verdict == "kept":
                    return None
                if (load := self._again(probe)) is not None:
                    return load
        return None

    def _between(self, low: float, high: float) -> float | None:
        if high <= low * (1 + self.tolerance):
            return None
        if self.over == "rate":
            middle = math.sqrt(low * high)
            short = float(f"{middle:.4g}")
            return short if low < short < high else middle
        return None if high - low <= 1 else float((low + high) // 2)

    def _again(self, probe: Probe) -> float | None:
        """Its load, while another measurement could settle its verdict; a single one never does."""
        settled = probe.verdict in ("kept", "broken") and len(probe.points) > 1
        return None if settled or len(probe.points) >= self.repeats else probe.load

    def _result(
        self,
        below: Probe | None,
        above: Probe | None,
        ended: Literal["edge", "all kept", "none kept", "stages", "invalid"],
    ) -> SearchResult:
        probes = self._probes()
        answer = None if below is None else below.load
        floor = self.low if answer is None else answer
        return SearchResult(
            over=self.over,
            constraints=list(dict.fromkeys(text for point in self._points() for text in point.constraints)),
            target=next((point.target for point in self._points()), ""),
            attainment=self.attainment,
            load=answer,
            verdict=None if below is None else below.verdict,
            kept=max((p.load for p in probes if p.verdict == "kept" and p.load <= floor), default=None),
            broken=min((p.load for p in probes if p.verdict == "broken" and p.load >= floor), default=None),
            ended=ended,
            probes=probes,
            notes=list(self._notes(above)),
        )

    def _points(self) -> list[Point]:
        return [point for points in self.measured.values() for point in points]

    def _notes(self, above: Probe | None) -> Iterable[str]:
        if above is not None and above.verdict == "invalid":
            reasons = dict.fromkeys(reason for point in self.measured[above.load] for reason in point.reasons)
            yield f"{above.load:g} could not be measured: {'; '.join(reasons)}"
