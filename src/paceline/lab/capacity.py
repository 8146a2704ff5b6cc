"""The highest load at which an engine keeps its constraints, from points that were measured."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.lab.point import Point
from paceline.lab.search import SearchResult
from paceline.lab.slo import Constraint


@dataclass(frozen=True, slots=True)
class Capacity:
    """Of one engine, under loads of one kind (request rates, or requests at once)."""

    best: Point | None
    """The highest load that keeps every constraint and lies below every load that breaks one; None: there is none."""
    broken: Point | None
    """The lowest load that breaks one; None: no valid point does."""
    kept_above: Point | None
    """A load above ``broken`` that keeps them all the same, which only noise explains."""
    valid: int
    invalid: int

    @property
    def span(self) -> tuple[float, float]:
        """The limit lies between these two loads."""
        low = 0.0 if self.best is None else load(self.best)
        return low, float("inf") if self.broken is None else load(self.broken)


def load(point: Point) -> float:
    """Offered requests/s, or requests at once.

    Raises:
        ValueError: the point has neither: a burst, a trace.
    """
    if point.offered_rate is not None:
        return point.offered_rate
    if point.batch is None:
        raise ValueError(f"{point.name} has no rate and no batch")
    return float(point.batch)


def value_of(point: Point, constraint: Constraint) -> float | None:
    """What the constraint is about, in seconds. None where it was not measured, and where the completed requests are
    within the limit but too many others failed: then nobody knows it."""
    value = constraint.value_of(getattr(point, f"{constraint.metric}_s"))
    return None if constraint.keeps(value) and not kept(point, constraint) else value


def broken_by(point: Point, constraints: Sequence[Constraint]) -> list[Constraint]:
    """Those that the point does not keep; what was not measured is not kept."""
    return [constraint for constraint in constraints if not kept(point, constraint)]


def kept(point: Point, constraint: Constraint) -> bool:
    """Whether a point keeps a constraint: by its own verdict, which knows of failures; where it was measured without
    this constraint, by its statistic."""
    for text, verdict in point.constraints.items():
        if replace(Constraint.parse(text), text=constraint.text) == constraint:
            return verdict is True
    return constraint.keeps(constraint.value_of(getattr(point, f"{constraint.metric}_s"))) is True


def saturated(point: Point) -> bool:
    """Whether requests came faster than they were answered: its latencies would grow with the length of the run."""
    return any(note.startswith("saturated") for note in point.notes)


def keeps(point: Point, constraints: Sequence[Constraint]) -> bool:
    return not saturated(point) and not broken_by(point, constraints)


def capacity(points: Sequence[Point], constraints: Sequence[Constraint]) -> Capacity:
    """Of points with loads of one kind. Points that are not valid decide nothing."""
    valid = sorted((point for point in points if point.valid), key=load)
    good = [point for point in valid if keeps(point, constraints)]
    broken = next((point for point in valid if not keeps(point, constraints)), None)
    below = [point for point in good if broken is None or load(point) < load(broken)]
    above = [point for point in good if broken is not None and load(point) > load(broken)]
    return Capacity(
        best=below[-1] if below else None,
        broken=broken,
        kept_above=above[0] if above else None,
        valid=len(valid),
        invalid=len(points) - len(valid),
    )


def capacity_found(points: Sequence[Point], search: SearchResult) -> Capacity:
    """What a search over these points found: it weighs points that were repeated near the edge."""
    valid = [point for point in points if point.valid]
    return Capacity(
        best=_best_at(valid, search.load),
        broken=_best_at(valid, search.broken),
        kept_above=None,
        valid=len(valid),
        invalid=len(points) - len(valid),
    )


def _best_at(points: Sequence[Point], where: float | None) -> Point | None:
    at = [point for point in points if load(point) == where]
    return max(at, key=lambda point: point.goodput_rps or 0.0, default=None)
