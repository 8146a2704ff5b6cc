"""The points of a report by what their load is measured in, and by engine."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from paceline.lab.point import Point

Axis = Literal["rate", "batch", "stage"]

# Okabe and Ito, "Color Universal Design" (2008): told apart with every common colour blindness, and by the symbols in
# black and white.
LOOKS = (
    ("#0072B2", "circle"),
    ("#D55E00", "square"),
    ("#009E73", "diamond"),
    ("#CC79A7", "triangle-up"),
    ("#7A5C00", "star"),
    ("#56B4E9", "hexagon"),
)

# The symbols as paths in a square from -6 to 6, for the legend.
MARKS = {
    "circle": "M-5,0a5,5 0 1,0 10,0a5,5 0 1,0 -10,0",
    "square": "M-4.5,-4.5h9v9h-9z",
    "diamond": "M0,-6L6,0L0,6L-6,0z",
    "triangle-up": "M0,-5.5L6,5H-6z",
    "star": "M0,-6L1.6,-2H6L2.4,0.7L3.8,5.2L0,2.4L-3.8,5.2L-2.4,0.7L-6,-2H-1.6z",
    "hexagon": "M-3,-5.2H3L6,0L3,5.2H-3L-6,0z",
}


@dataclass(frozen=True, slots=True)
class Look:
    """How an engine is drawn, in every chart of a report."""

    colour: str
    symbol: str


def looks(engines: Iterable[str]) -> dict[str, Look]:
    return {engine: Look(*LOOKS[place % len(LOOKS)]) for place, engine in enumerate(dict.fromkeys(engines))}


@dataclass(frozen=True, slots=True)
class Panel:
    """Engines under loads of one kind."""

    axis: Axis
    workload: str
    """What it is where the report has several; else empty."""
    curves: dict[str, list[Point]]
    """Engine -> its points in order of load; stages in the order of the experiment."""

    @property
    def title(self) -> str:
        title = {"rate": "Request rates", "batch": "Requests at once", "stage": "Workloads"}[self.axis]
        return f"{title}: {self.workload}" if self.workload else title

    @property
    def axis_title(self) -> str:
        return {"rate": "offered requests/s", "batch": "requests at once", "stage": ""}[self.axis]

    @property
    def points(self) -> list[Point]:
        return [point for points in self.curves.values() for point in points]


def axis_of(point: Point) -> Axis:
    if point.offered_rate is not None:
        return "rate"
    return "batch" if point.batch is not None else "stage"


def load_of(point: Point) -> float | str:
    """The place of a point on its axis: requests/s, requests at once, or the name of its stage."""
    if point.offered_rate is not None:
        return point.offered_rate
    return point.batch if point.batch is not None else point.name


def workload_of(point: Point) -> str:
    """``2048x128`` for fixed lengths; else what the workload was made from. How many requests is left out: it often
    goes with the load."""
    facts = dict(point.load.get("workload") or {})
    facts.pop("requests", None)
    if facts.get("kind") == "fixed" and {"input", "output"} <= set(facts):
        return f"{facts['input']}x{facts['output']}"
    kind = str(facts.pop("kind", ""))
    return " ".join([kind, *(f"{key}={value}" for key, value in facts.items())]).strip()


def panels(engines: dict[str, list[Point]]) -> list[Panel]:
    """One for each workload under rates and under batches, and one for all other stages."""
    groups: dict[tuple[Axis, str], dict[str, list[Point]]] = {}
    for engine, points in engines.items():
        for point in points:
            axis = axis_of(point)
            key = (axis, "" if axis == "stage" else workload_of(point))
            groups.setdefault(key, {}).setdefault(engine, []).append(point)
    found = []
    for axis, workload in sorted(groups, key=lambda key: ("rate", "batch", "stage").index(key[0])):
        curves = groups[axis, workload]
        if axis != "stage":
            curves = {engine: sorted(points, key=lambda p: float(load_of(p))) for engine, points in curves.items()}
        several = sum(key[0] == axis for key in groups) > 1
        found.append(Panel(axis, workload if several else "", curves))
    return found
