"""Names of engines that are unique in a report, whatever runs it joins."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.lab.point import Point
from paceline.lab.report.text import moment
from paceline.lab.results import MeasuredTarget, Results
from paceline.lab.search import SearchResult

if TYPE_CHECKING:
    from paceline.lab.client.log import StageLog


@dataclass(frozen=True, slots=True)
class Engine:
    """One target of one run."""

    name: str
    """The target's; where several runs have one of that name, with the run's experiment or time."""
    target: MeasuredTarget
    results: Results
    points: list[Point]
    searches: list[SearchResult]


def engines(results: Sequence[Results]) -> list[Engine]:
    """Every target of every run, in their order."""
    uses = Counter(target.name for run in results for target in run.targets)
    by_experiment = len({run.experiment for run in results}) == len(results)
    found: list[Engine] = []
    for run in results:
        alone = len(run.targets) == 1
        for target in run.targets:
            name = target.name
            if uses[name] > 1:
                name = f"{name} ({run.experiment if by_experiment else moment(run.started_at)})"
            found.append(
                Engine(
                    name=_unused(name, found),
                    target=target,
                    results=run,
                    points=[
                        point for point in run.points if point.target == target.name or (alone and not point.target)
                    ],
                    searches=[
                        item for item in run.searches if item.target == target.name or (alone and not item.target)
                    ],
                )
            )
    return found


def engine_of(log: "StageLog", found: Sequence[Engine]) -> str:
    """The engine whose run the log is of: that of its name that had started last; else the target's own name."""
    same = [engine for engine in found if engine.target.name == log.target.name]
    before = [engine for engine in same if engine.results.started_at <= log.started_at]
    chosen = max(before or same, key=lambda engine: engine.results.started_at, default=None)
    return log.target.name if chosen is None else chosen.name


def _unused(name: str, found: Sequence[Engine]) -> str:
    taken = {engine.name for engine in found}
    return next(
        label for count in range(1, len(found) + 2) if (label := f"{name} #{count}" if count > 1 else name) not in taken
    )
