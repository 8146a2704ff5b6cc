"""What each request of a stage met with, drawn from its log: time to first token, and how many were open when."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.lab.record import RequestRecord
from paceline.lab.report.charts import LIMIT, Figure, Limit, base_layout, limit_line, short
from paceline.lab.report.curves import Look

if TYPE_CHECKING:
    from paceline.lab.client.log import StageLog

MAX_DOTS = 30_000
"""Of all stages together, so that the file stays small; a stage shows its share, and never fewer than `MIN_DOTS`."""
MIN_DOTS, MAX_DOTS_A_STAGE = 100, 2_000
SLOWEST = 25
"""The slowest requests of a stage are always drawn."""
STEPS = 400
"""Of the timeline of open requests; each shows the most in its span."""


@dataclass(frozen=True, slots=True)
class StageView:
    """One stage, of all engines that ran it."""

    name: str
    ttft: Figure
    open: Figure
    note: str


def stage_views(
    logs: Sequence[tuple[str, "StageLog"]], looks: dict[str, Look], limits: Sequence[Limit]
) -> list[StageView]:
    """One for each stage, by load and else in the order of the logs; these are (engine as the report names it, log).
    Limits of TTFT are drawn in."""
    stages: dict[str, list[tuple[str, StageLog]]] = {}
    for engine, log in logs:
        stages.setdefault(log.stage.name, []).append((engine, log))
    cap = min(MAX_DOTS_A_STAGE, max(MIN_DOTS, MAX_DOTS // max(len(logs), 1)))
    order = sorted(
        stages.items(), key=lambda item: (item[1][0][1].stage.offered_rate or 0, item[1][0][1].stage.batch or 0)
    )
    return [_view(name, found, looks, limits, cap) for name, found in order]


def _view(
    name: str, logs: list[tuple[str, "StageLog"]], looks: dict[str, Look], limits: Sequence[Limit], cap: int
) -> StageView:
    dots, lines, notes = [], [], []
    for engine, log in logs:
        records = log.records
        answered = [record for record in records if record.ttft is not None]
        shown = thinned(answered, cap)
        failed = [record for record in records if not record.ok and record.sent is not None]
        lost = sum(not record.ok for record in records)
        if shown:
            dots.append(_dots(engine, looks[engine], shown))
        if failed:
            dots.append(_failures(engine, thinned(failed, cap // 4)))
        times, counts = open_requests(records)
        if times:
            lines.append(_line(engine, looks[engine], times, counts))
        note = f"{engine}: {len(records):,} requests, {lost:,} failed"
        if lost > len(failed):
            note += f", {lost - len(failed):,} of these never sent"
        if len(shown) < len(answered):
            note += f"; {len(shown):,} of {len(answered):,} drawn, evenly and the {SLOWEST} slowest"
        notes.append(note + ("; interrupted" if log.interrupted else ""))
    ttft = base_layout("scheduled send (s from the start of the stage)", "TTFT (s)")
    ttft["yaxis"]["rangemode"] = "tozero"
    ttft["shapes"] = [limit_line(limit, 1.0) for limit in limits if limit.metric == "ttft"]
    flight = base_layout("s from the start of the stage", "requests sent and not ended")
    flight["yaxis"]["rangemode"] = "tozero"
    return StageView(name, {"data": dots, "layout": ttft}, {"data": lines, "layout": flight}, ". ".join(notes) + ".")


def thinned(records: list[RequestRecord], most: int) -> list[RequestRecord]:
    """About ``most`` of them at even distances, in order, and the slowest ones."""
    if len(records) <= most:
        return records
    every = -(-len(records) // max(most - SLOWEST, 1))
    slowest = sorted(range(len(records)), key=lambda place: records[place].ttft or 0.0)[-SLOWEST:]
    return [records[place] for place in sorted({*range(0, len(records), every), *slowest})]


def open_requests(records: Sequence[RequestRecord]) -> tuple[list[float], list[int]]:
    """(times, requests open from then on): those sent and not ended. At most `STEPS` steps, each with the most in its
    span. A request without an end stays open."""
    sent = np.sort(np.array([record.sent for record in records if record.sent is not None], dtype=float))
    if not len(sent):
        return [], []
    ended = np.sort(np.array([r.ended for r in records if r.sent is not None and r.ended is not None], dtype=float))
    times = np.unique(np.concatenate([sent, ended]))
    counts = np.searchsorted(sent, times, side="right") - np.searchsorted(ended, times, side="right")
    if len(times) > STEPS:
        edges = np.linspace(times[0], times[-1], STEPS + 1)
        starts = np.searchsorted(times, edges[:-1])
        most = np.where(starts > 0, counts[starts - 1], 0)  # those still open from the span before
        filled = starts < np.append(starts[1:], len(times))
        most[filled] = np.maximum(most[filled], np.maximum.reduceat(counts, starts[filled]))
        times, counts = np.append(edges[:-1], times[-1]), np.append(most, counts[-1])
    return [float(f"{time:.6g}") for time in times], [int(count) for count in counts]


def _dots(engine: str, look: Look, records: list[RequestRecord]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": engine,
        "legendgroup": engine,
        "x": [short(record.due) for record in records],
        "y": [short(record.ttft) for record in records],
        "hovertemplate": "due %{x} s: TTFT %{y} s",
        "marker": {"color": look.colour, "symbol": look.symbol, "size": 5, "opacity": 0.6},
    }


def _failures(engine: str, records: list[RequestRecord]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": f"{engine}, failed",
        "legendgroup": engine,
        "x": [short(record.due) for record in records],
        "y": [0] * len(records),
        "hovertemplate": "due %{x} s: failed",
        "marker": {"color": LIMIT, "symbol": "x", "size": 7},
    }


def _line(engine: str, look: Look, times: list[float], counts: list[int]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": engine,
        "legendgroup": engine,
        "x": times,
        "y": counts,
        "hovertemplate": "%{x} s: %{y} open",
        "line": {"color": look.colour, "shape": "hv", "width": 1.5},
    }
