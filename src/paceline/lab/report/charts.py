"""Charts of a panel, as the plain dictionaries that plotly.js draws (``data`` and ``layout``).

Engines differ in colour and symbol, statistics in the dash of the line. Points that are not valid are hollow crosses
that no line joins.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from math import log10
from typing import Any

from paceline.lab.point import Point, Statistics
from paceline.lab.report.curves import Look, Panel, load_of
from paceline.lab.report.text import number

Figure = dict[str, Any]

INK, MUTED, GRID, LIMIT = "#1b1f24", "#57606a", "#e4e8ec", "#B00020"
DASHES = {"p99": "solid", "p50": "dot"}
METRICS = {
    "ttft": "Time to first token (TTFT)",
    "tpot": "Time per output token (TPOT)",
    "itl": "Gap between tokens (ITL)",
    "e2e": "Time to last token (E2E)",
}


@dataclass(frozen=True, slots=True)
class Limit:
    """A constraint, as a chart draws it."""

    metric: str
    statistic: str
    seconds: float
    text: str


@dataclass(frozen=True, slots=True)
class Line:
    """What of each point is drawn, and how."""

    value: Callable[[Point], float | None]
    unit: str
    statistic: str = ""
    dash: str = "solid"
    interval: Callable[[Point], tuple[float, float] | None] | None = None


@dataclass(frozen=True, slots=True)
class Chart:
    id: str
    title: str
    note: str
    """How to read it."""
    figure: Figure


def panel_charts(
    panel: Panel, looks: dict[str, Look], limits: Sequence[Limit], prefix: str, asked: Sequence[float] = ()
) -> list[Chart]:
    """Latencies with the limits drawn in, throughput, and with constraints goodput and attainment, against the load.

    A chart without a single value is left out.

    Args:
        asked: attainments that searches asked for.
    """
    charts = []
    for metric in METRICS:
        drawn = [limit for limit in limits if limit.metric == metric]
        if metric != "e2e" or drawn:
            charts.append(_latency(panel, looks, metric, drawn, f"{prefix}-{metric}"))
    line = Line(
        lambda point: point.output_tokens_per_s,
        "output tokens/s",
        interval=lambda point: point.intervals.get("output_tokens_per_s"),
    )
    charts.append(_plain(panel, looks, f"{prefix}-throughput", "Throughput", "of completed requests", line))
    if any(point.goodput_rps is not None for point in panel.points):
        line = Line(
            lambda point: point.goodput_rps, "requests/s", interval=lambda point: point.intervals.get("goodput_rps")
        )
        charts.append(_plain(panel, looks, f"{prefix}-goodput", "Goodput", "requests that kept every constraint", line))
        charts.append(_attainment(panel, looks, asked, f"{prefix}-attainment"))
    return [chart for chart in charts if chart.figure["data"]]


def _latency(panel: Panel, looks: dict[str, Look], metric: str, limits: list[Limit], id: str) -> Chart:
    statistics = list(dict.fromkeys(["p99", "p50", *(limit.statistic for limit in limits)]))
    values = [
        value
        for point in panel.points
        for statistic in statistics
        if (value := getattr(_statistics(point, metric), statistic)) is not None
    ] + [limit.seconds for limit in limits]
    ends = [point.intervals.get(f"{metric}_s.{statistic}", ()) for point in panel.points for statistic in statistics]
    values += [end for pair in ends for end in pair if end > 0]
    scale, unit = (1.0, "s") if values and max(values) >= 20 else (1e3, "ms")
    data = []
    for statistic in statistics:

        def value(point: Point, statistic: str = statistic) -> float | None:
            seconds: float | None = getattr(_statistics(point, metric), statistic)
            return None if seconds is None else seconds * scale

        def interval(point: Point, statistic: str = statistic) -> tuple[float, float] | None:
            ends = point.intervals.get(f"{metric}_s.{statistic}")
            return None if ends is None else (ends[0] * scale, ends[1] * scale)

        data += _traces(panel, looks, Line(value, unit, statistic, DASHES.get(statistic, "dash"), interval))
    layout = _layout(panel, unit)
    positive = [value * scale for value in values if value > 0]
    if positive and max(positive) > 30 * min(positive):
        low, high = log10(min(positive) * 0.8), log10(max(positive) * 1.25)
        layout["yaxis"] |= {
            "type": "log",
            "dtick": 1 if high - low > 3 else "D2",
            "range": [round(low, 3), round(high, 3)],
        }
    elif positive:
        layout["yaxis"]["range"] = [0, short(max(positive) * 1.1)]
    layout["shapes"] = [limit_line(limit, scale) for limit in limits]
    note = ", ".join(f"{statistic} {_stroke(panel, statistic)}" for statistic in statistics)
    note += "; bars: 95% interval" if any(ends) else ""
    return Chart(
        id, METRICS[metric], note + ("; the red line is the limit" if limits else ""), {"data": data, "layout": layout}
    )


def _stroke(panel: Panel, statistic: str) -> str:
    if panel.axis == "stage":
        return "large" if statistic == "p99" else "small"
    return {"p99": "solid", "p50": "dotted"}.get(statistic, "dashed")


def _plain(panel: Panel, looks: dict[str, Look], id: str, title: str, note: str, line: Line) -> Chart:
    layout = _layout(panel, line.unit)
    layout["yaxis"]["rangemode"] = "tozero"
    if line.interval is not None and any(line.interval(point) is not None for point in panel.points):
        note += "; bars: 95% interval"
    draw = _bars if panel.axis == "stage" else _traces
    return Chart(id, title, note, {"data": draw(panel, looks, line), "layout": layout})


def _attainment(panel: Panel, looks: dict[str, Look], asked: Sequence[float], id: str) -> Chart:
    def value(point: Point) -> float | None:
        return None if point.attainment is None else point.attainment * 100

    def interval(point: Point) -> tuple[float, float] | None:
        ends = point.attainment_interval
        return None if ends is None else (100 * ends[0], 100 * ends[1])

    data = _traces(panel, looks, Line(value, "%", interval=interval))
    layout = _layout(panel, "% of the requests sent")
    layout["yaxis"]["range"] = [0, 104]
    layout["shapes"] = [_horizontal(100 * share, f"asked: {100 * share:g}%", "top") for share in asked]
    note = "kept every constraint; bars: 95% interval" + ("; the red line was asked for" if asked else "")
    return Chart(id, "Attainment", note, {"data": data, "layout": layout})


def _statistics(point: Point, metric: str) -> Statistics:
    found: Statistics = getattr(point, f"{metric}_s")
    return found


def _traces(panel: Panel, looks: dict[str, Look], line: Line) -> list[dict[str, Any]]:
    """A line of the valid points of each engine, and its invalid ones apart."""
    traces = []
    for engine, points in panel.curves.items():
        look = looks[engine]
        for valid in (True, False):
            chosen = [
                (point, value) for point in points if point.valid is valid and (value := line.value(point)) is not None
            ]
            if not chosen:
                continue
            label = f"{line.statistic} " if line.statistic else ""
            trace = {
                "type": "scatter",
                "mode": "lines+markers" if valid and panel.axis != "stage" else "markers",
                "name": engine if valid else f"{engine}, not valid",
                "legendgroup": engine,
                "offsetgroup": engine,
                "x": [load_of(point) for point, _ in chosen],
                "y": [short(value) for _, value in chosen],
                "text": ["" if valid else "<br>" + "<br>".join(map(escape, point.reasons)) for point, _ in chosen],
                "hovertemplate": f"%{{x}}: {label}%{{y}} {line.unit}%{{text}}",
                "line": {"color": look.colour, "dash": line.dash, "width": 2 if line.dash == "solid" else 1.5},
                "marker": _marker(look, valid, small=line.dash != "solid"),
            }
            if line.interval is not None:
                trace["error_y"] = _error_bars([(value, line.interval(point)) for point, value in chosen])
            traces.append(trace)
    return traces


def _error_bars(values: list[tuple[float, tuple[float, float] | None]]) -> dict[str, Any]:
    """Of values with their intervals, where they have one."""
    return {
        "type": "data",
        "symmetric": False,
        "thickness": 1.2,
        "width": 3,
        "array": [short(max(0.0, span[1] - value)) if span else None for value, span in values],
        "arrayminus": [short(max(0.0, value - span[0])) if span else None for value, span in values],
    }


def _marker(look: Look, valid: bool, *, small: bool) -> dict[str, Any]:
    size = 6 if small else 9
    if valid:
        return {"color": look.colour, "symbol": look.symbol, "size": size, "line": {"color": "#fff", "width": 1}}
    return {"color": look.colour, "symbol": "x-thin", "size": size, "line": {"color": look.colour, "width": 2}}


def _bars(panel: Panel, looks: dict[str, Look], line: Line) -> list[dict[str, Any]]:
    bars = []
    written = len(panel.points) <= 8
    for engine, points in panel.curves.items():
        chosen = [point for point in points if line.value(point) is not None]
        if chosen:
            values = [(line.value(point) or 0.0, line.interval and line.interval(point)) for point in chosen]
            bars.append(
                {
                    "type": "bar",
                    "name": engine,
                    "legendgroup": engine,
                    "x": [point.name for point in chosen],
                    "y": [short(line.value(point)) for point in chosen],
                    "text": [number(line.value(point)) if written else "" for point in chosen],
                    "textposition": "outside",
                    "error_y": _error_bars(values),
                    "textangle": 0,
                    "cliponaxis": False,
                    "hovertext": ["" if point.valid else ", not valid" for point in chosen],
                    "hovertemplate": f"%{{x}}: %{{y}} {line.unit}%{{hovertext}}",
                    "marker": {
                        "color": looks[engine].colour,
                        "pattern": {"shape": ["" if point.valid else "/" for point in chosen]},
                        "opacity": [1 if point.valid else 0.45 for point in chosen],
                    },
                }
            )
    return bars


def limit_line(limit: Limit, scale: float) -> dict[str, Any]:
    return _horizontal(limit.seconds * scale, limit.text, "bottom")


def _horizontal(y: float, text: str, anchor: str) -> dict[str, Any]:
    return {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": y,
        "y1": y,
        "line": {"color": LIMIT, "width": 1.5, "dash": "dash"},
        "label": {"text": text, "textposition": "start", "yanchor": anchor, "font": {"color": LIMIT}},
    }


def _layout(panel: Panel, unit: str) -> dict[str, Any]:
    layout = base_layout(panel.axis_title, unit)
    if panel.axis == "batch":
        loads = sorted({point.batch for point in panel.points if point.batch})
        layout["xaxis"] |= {"type": "log", "tickvals": loads, "ticktext": [str(load) for load in loads]}
    elif panel.axis == "stage":
        order = list(dict.fromkeys(point.name for point in panel.points))
        layout["xaxis"] |= {"type": "category", "categoryorder": "array", "categoryarray": order}
        layout |= {"scattermode": "group", "scattergap": 0.6, "barmode": "group"}
    else:
        layout["xaxis"]["rangemode"] = "tozero"
    return layout


def base_layout(x: str, y: str) -> dict[str, Any]:
    axis = {"gridcolor": GRID, "linecolor": MUTED, "zeroline": False, "ticks": "outside", "tickcolor": GRID}
    return {
        "margin": {"l": 62, "r": 14, "t": 8, "b": 46},
        "height": 320,
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": INK},
        "paper_bgcolor": "#fff",
        "plot_bgcolor": "#fff",
        "hovermode": "closest",
        "showlegend": False,
        "separators": ".,",
        "xaxis": axis | {"title": {"text": x, "standoff": 8}, "automargin": True},
        "yaxis": axis
        | {
            "title": {"text": y, "standoff": 8},
            "automargin": True,
            "exponentformat": "none",
            "separatethousands": True,
        },
    }


def short(value: float | None) -> float | None:
    """Five significant digits: enough to draw, and short in the file."""
    return None if value is None else float(f"{value:.5g}")
