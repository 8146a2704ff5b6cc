"""Looks for the highest load at which enough requests keep the constraints."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from paceline.lab.point import Point
from paceline.lab.statistics import wilson

Verdict = Literal["kept", "broken", "indistinguishable", "invalid"]
"""Of a load. ``kept``: the confidence interval of its attainment lies at or above the share asked for; ``broken``: below
it, or the load saturates the engine; ``indistinguishable``: the interval holds the share; ``invalid``: no valid point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One load and all that was measured at it."""

    load: float
    """Requests a second, or batch size."""
    verdict: Verdict
    attainment: float | None
    """Of the valid points together; None where there is none."""
    interval: tuple[float, float] | None
    """95% confidence interval (Wilson) of the attainment."""
    points: list[str]
    """Their names, in the order of measurement, invalid ones too."""
    passes: bool
    """Whether the attainment is at least the share asked for, and the load does not saturate the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What a search found."""

    over: Literal["rate", "batch"]
    target: str = ""
    constraints: list[str] = field(default_factory=list)
    attainment: float
    """Share of the requests sent that must keep every constraint."""
    load: float | None
    """The answer: the highest load that passes, of those below every load that does not. None: not even the lowest."""
    verdict: Verdict | None
    """Of that load: ``kept``, or ``indistinguishable`` where the measurements cannot tell it from one that breaks."""
    kept: float | None
    """The highest load up to the answer whose verdict is ``kept``."""
    broken: float | None
    """The lowest load above the answer whose verdict is ``broken``. The edge lies between ``kept`` and it."""
    ended: Literal["edge", "all kept", "none kept", "stages", "invalid"]
    """Why the search ended: the edge is known to the tolerance; the highest load passes; the lowest does not; the
    stages are used up; a load next to the answer (or the lowest) could not be measured."""
    probes: list[Probe]
    """By load."""
    notes: list[str] = field(default_factory=list)
