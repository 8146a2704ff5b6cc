"""Writes the report: one HTML file that needs no network."""

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.lab.report.charts import Chart, Limit, panel_charts
from paceline.lab.report.curves import MARKS, Panel, looks, panels
from paceline.lab.report.definitions import DEFINITIONS
from paceline.lab.report.engines import Engine, engine_of, engines
from paceline.lab.report.requests import stage_views
from paceline.lab.report.table import Column, Row, point_table, remarks
from paceline.lab.report.text import listing, moment, one_line
from paceline.lab.report.verdicts import Verdict, verdicts
from paceline.lab.results import Results
from paceline.lab.slo import Constraint, parse_constraints

if TYPE_CHECKING:
    from paceline.lab.client.log import StageLog

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class PanelView:
    title: str
    charts: list[Chart]
    columns: list[Column]
    rows: list[Row]
    remarks: list[str]


@dataclass(frozen=True, slots=True)
class VerdictGroup:
    title: str
    verdicts: list[Verdict]


@dataclass(frozen=True, slots=True)
class Run:
    """How one run was made."""

    title: str
    facts: list[tuple[str, str]]
    commands: list[str]


def write_report(results: Sequence[Results], logs: Sequence["StageLog"], out: Path) -> None:
    """Writes tables, charts and verdicts of one or several runs to one file, engines side by side.

    Args:
        results: What was measured. Runs with constraints of their own are all held to those of the first that has any.
        logs: Stages whose single requests are drawn; may be empty, and may be of some stages only.
        out: An HTML file, at most 6 MB (4.8 MB of it is plotly.js); replaced if it exists.

    Raises:
        ModuleNotFoundError: plotly is not installed; it comes with the extra ``bench``.
    """
    # Imported late: plotly and the templates take a second that a run without a report does not need.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("a report needs plotly: pip install 'paceline[bench]'") from error

    found = engines(results)
    constraints = _constraints(results)
    named_logs = [(engine_of(log, found), log) for log in logs]
    colours = looks([*(engine.name for engine in found), *(name for name, _ in named_logs)])
    groups = panels({engine.name: engine.points for engine in found})
    limits = [Limit(item.metric, item.statistic, item.limit_s, item.text) for item in constraints]
    drawn = [
        PanelView(
            panel.title,
            panel_charts(panel, colours, limits, f"chart-{place}", _asked(results, panel)),
            *point_table(panel, colours, constraints),
            remarks(panel),
        )
        for place, panel in enumerate(groups)
    ]
    views = stage_views(named_logs, colours, limits)
    data = {
        "charts": {chart.id: chart.figure for panel in drawn for chart in panel.charts},
        "stages": [{"name": view.name, "ttft": view.ttft, "open": view.open, "note": view.note} for view in views],
    }
    templates = Environment(loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined)
    html = templates.get_template("report.html.j2").render(
        title=" and ".join(dict.fromkeys(run.experiment for run in results)) or "Logs",
        subtitle=_subtitle(results, found, logs),
        verdicts=list(_verdicts(results, logs, found, groups, constraints)),
        looks=colours,
        marks=MARKS,
        constraints=", ".join(constraint.text for constraint in constraints),
        panels=drawn,
        any_invalid=any(not point.valid for panel in groups for point in panel.points),
        stages=views,
        runs=list(_runs(results, found, logs)),
        definitions=DEFINITIONS,
        data=_json(data),
        charts_drawn=bool(data["charts"] or views),
        plotly=get_plotlyjs(),
        css=(FOLDER / "report.css").read_text(),
        js=(FOLDER / "report.js").read_text(),
    )
    out.write_text(html, encoding="utf-8")


def _json(data: Any) -> str:
    """For a script element, which ``</`` would end."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _constraints(results: Sequence[Results]) -> list[Constraint]:
    return next((parse_constraints(", ".join(run.constraints)) for run in results if run.constraints), [])


def _asked(results: Sequence[Results], panel: Panel) -> list[float]:
    """Attainments that searches over the panel's loads asked for."""
    return sorted({search.attainment for run in results for search in run.searches if search.over == panel.axis})


def _subtitle(results: Sequence[Results], found: Sequence[Engine], logs: Sequence["StageLog"]) -> str:
    points = [point for run in results for point in run.points]
    invalid = sum(not point.valid for point in points)
    names = [engine.name for engine in found] or list(dict.fromkeys(log.target.name for log in logs))
    parts = [listing(names), " and ".join(dict.fromkeys(moment(run.started_at) for run in results))]
    parts.append(f"{len(points)} points" + (f", {invalid} of them not valid" if invalid else ""))
    return " · ".join(part for part in parts if part)


def _verdicts(
    results: Sequence[Results],
    logs: Sequence["StageLog"],
    found: Sequence[Engine],
    groups: Sequence[Panel],
    constraints: Sequence[Constraint],
) -> Iterator[VerdictGroup]:
    cautions = []
    if any(run.interrupted for run in results) or any(log.interrupted for log in logs):
        text = "a run ended before its last stage; this report has what was measured."
        cautions.append(Verdict("broken", "Interrupted:", text))
    for run in results:
        for failure in run.failures:
            name, _, why = failure.partition(": ")
            cautions.append(Verdict("broken", f"{name}:", one_line(why)))
    stated = {", ".join(run.constraints) for run in results if run.constraints}
    if len(stated) > 1:
        text = (
            f"the runs were made for {' and for '.join(sorted(stated))}. Goodput and attainment are by each run's own."
        )
        cautions.append(Verdict("broken", "Different constraints:", text))
    if not groups:
        cautions.append(Verdict("neutral", "No verdict:", "no point was measured."))
    if cautions:
        yield VerdictGroup("", cautions)
    for panel in groups:
        yield VerdictGroup(panel.title, verdicts(panel, found, constraints))


def _runs(results: Sequence[Results], found: Sequence[Engine], logs: Sequence["StageLog"]) -> Iterator[Run]:
    for run in results:
        facts = [("started", moment(run.started_at))]
        for engine in found:
            if engine.results is run:
                target = engine.target
                facts.append((engine.name, f"{target.model} at {target.url}".strip()))
                facts += [
                    (f"{engine.name} GPU", f"{gpus.count} x {gpus.name}, driver {gpus.driver}") for gpus in target.gpus
                ]
                facts += list(_facts(target.info, f"{engine.name} "))
        if run.constraints:
            facts.append(("constraints", ", ".join(run.constraints)))
        facts += _sent(run)
        facts += list(_facts(run.machine, "client "))
        starts = [shlex.join(target.command) for target in run.targets if target.command]
        yield Run(run.experiment, facts, list(dict.fromkeys([*run.commands, *starts])))
    if not results and logs:
        log = logs[0]
        facts = [("started", moment(log.started_at)), *_facts(log.machine, "client ")]
        yield Run("Logs", facts, list(dict.fromkeys(log.command for log in logs if log.command)))


def _sent(run: Results) -> list[tuple[str, str]]:
    """What was sent, how and by how many processes: each different one once."""

    def texts(tables: Iterable[Mapping[str, Any]]) -> str:
        return "; ".join(dict.fromkeys(" ".join(f"{key}={value}" for key, value in table.items()) for table in tables))

    loads = [point.load for point in run.points]
    workers = sorted({f"{point.client['workers']:g}" for point in run.points if "workers" in point.client})
    plain = ("rate", "batch", "workload")  # the table has the first two
    found = {
        "workload": texts(load["workload"] for load in loads if load.get("workload")),
        "load": texts({key: value for key, value in load.items() if key not in plain} for load in loads),
        "workers": ", ".join(workers),
    }
    return [(name, text) for name, text in found.items() if text]


def _facts(values: Any, name: str) -> Iterator[tuple[str, str]]:
    """(name, value) of every leaf; names of nested values are joined."""
    if isinstance(values, dict):
        for key, value in values.items():
            yield from _facts(value, f"{name}{str(key).replace('_', ' ')} ")
    elif isinstance(values, list | tuple) and any(isinstance(value, dict) for value in values):
        for place, value in enumerate(values):
            yield from _facts(value, f"{name}{place} ")
    elif isinstance(values, list | tuple):
        yield name.strip(), ", ".join(map(str, values))
    else:
        yield name.strip(), str(values)
