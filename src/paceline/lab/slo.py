"""Service constraints: what a request, and a point, must keep."""

import operator
import re
from dataclasses import dataclass

import numpy as np

from paceline.lab.gaps import gaps
from paceline.lab.point import Statistics
from paceline.lab.record import RequestRecord
from paceline.lab.statistics import PERCENTILES, Floats, summarize

METRICS = ("ttft", "tpot", "itl", "e2e")
STATISTICS = ("mean", *PERCENTILES, "max")
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}

PRESETS: dict[str, str] = {
    # MLPerf Inference, server scenario: p99 of TTFT and TPOT.
    "mlperf-llama3.1-8b": "ttft_p99 <= 2s, tpot_p99 <= 100ms",
    "mlperf-llama3.1-8b-interactive": "ttft_p99 <= 500ms, tpot_p99 <= 30ms",
    "mlperf-llama2-70b": "ttft_p99 <= 2s, tpot_p99 <= 200ms",
    "mlperf-llama2-70b-interactive": "ttft_p99 <= 450ms, tpot_p99 <= 40ms",
    "mlperf-deepseek-r1": "ttft_p99 <= 2s, tpot_p99 <= 80ms",
    "mlperf-deepseek-r1-interactive": "ttft_p99 <= 1500ms, tpot_p99 <= 15ms",
    # An assistant that feels immediate: half a second to the first word, then well above reading speed.
    "interactive": "ttft_p99 < 500ms, tpot_p99 < 30ms",
    # Text that is read while it comes: twice as fast as people read (some 250 words a minute), and without a stop.
    "streaming": "ttft_p99 < 2s, tpot_p99 < 100ms, itl_p99 < 500ms",
}

_FORM = re.compile(r"([a-z0-9]+)_([a-z0-9]+)\s*(<=?)\s*(\d+(?:\.\d+)?|\.\d+)\s*(us|ms|s)")
_COMPARE = {"<": operator.lt, "<=": operator.le}


class InvalidConstraint(ValueError):
    """Text that is no constraint; the message says what would be one."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """An upper limit of one statistic of one metric."""

    text: str
    """As written."""
    metric: str
    """One of `METRICS`."""
    statistic: str
    """One of `STATISTICS`."""
    comparison: str
    """``<`` or ``<=``."""
    limit_s: float

    @classmethod
    def parse(cls, text: str) -> "Constraint":
        """Reads ``METRIC_STATISTIC < NUMBER UNIT``: ``ttft_p99 < 1s``, ``tpot_mean<=20ms``.

        Raises:
            InvalidConstraint: the text is of another form.
        """
        written = text.strip()
        match = _FORM.fullmatch(written)
        if match is None or match[1] not in METRICS or match[2] not in STATISTICS:
            raise InvalidConstraint(
                f"{written!r} is no constraint. One is METRIC_STATISTIC < LIMIT, for example 'ttft_p99 < 1s': "
                f"METRIC of {', '.join(METRICS)}, STATISTIC of {', '.join(STATISTICS)}, < or <=, LIMIT in us, ms or s"
            )
        limit = float(match[4]) * UNITS[match[5]]
        if limit == 0:
            raise InvalidConstraint(f"{written!r}: the limit must be above 0")
        return cls(written, match[1], match[2], match[3], limit)

    def keeps(self, value: float | None) -> bool | None:
        """Whether a value in seconds is within the limit; None for one that was not measured."""
        return None if value is None else bool(_COMPARE[self.comparison](value, self.limit_s))

    def share_of(self, values: Floats) -> float:
        """Which share of values in seconds (at least one) is within the limit."""
        return float(np.mean(_COMPARE[self.comparison](values, self.limit_s)))

    def of(self, record: RequestRecord) -> float | None:
        """A request's own value in seconds; None for a failure and for a value that was not measured.

        TTFT, TPOT and E2E have one value a request. Of ITL a request has many, and the statistic is that of its own.
        """
        if not record.ok:
            return None
        if self.metric == "itl":
            return self.value_of(summarize(gaps(record)))
        value: float | None = getattr(record, self.metric)
        return value

    def value_of(self, statistics: Statistics) -> float | None:
        """The statistic that the constraint is about."""
        value: float | None = getattr(statistics, self.statistic)
        return value


def parse_constraints(text: str) -> list[Constraint]:
    """Reads constraints and names of presets, separated by commas; an empty text has none.

    Raises:
        InvalidConstraint: a part is neither, or two parts limit the same statistic.
    """
    found: list[Constraint] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if part in PRESETS:
            found += map(Constraint.parse, PRESETS[part].split(","))
        elif re.search("[<>=]", part):
            found.append(Constraint.parse(part))
        else:
            raise InvalidConstraint(f"no preset named {part!r}; known are {', '.join(PRESETS)}")
    names = [(constraint.metric, constraint.statistic) for constraint in found]
    for name in names:
        if names.count(name) > 1:
            raise InvalidConstraint(f"{'_'.join(name)} is limited twice")
    return found
