"""`paceline bench compare`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.bench.carry_out import check_writable
from paceline.cli.bench.options import OUTPUT
from paceline.cli.errors import bad_values, failures
from paceline.cli.tables import readable_table, terminal

if TYPE_CHECKING:
    from paceline.lab.compare import Difference

SHOWN = ("output_tokens_per_s", "goodput_rps", "ttft_s.mean", "ttft_s.p99", "tpot_s.mean", "tpot_s.p99", "attainment")
"""Without --all; and what searches found."""
FIGURES = {"output_tokens_per_s": "tokens/s", "requests_per_s": "requests/s", "goodput_rps": "goodput/s"}
COLOURS = {"better": "green", "worse": "red", "indistinguishable": "", "unknown": "dim"}


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="Results (--json) to compare with.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Results to compare.")],
    every: Annotated[bool, typer.Option("--all", help="Show every figure.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", help="File for a report of both.", rich_help_panel=OUTPUT)
    ] = None,
) -> None:
    """Compare two runs: each figure of B against A, and whether the difference is more than noise."""
    from paceline.lab.compare import compare as differences
    from paceline.lab.report import write_report
    from paceline.lab.results import read_results

    check_writable(html)
    with bad_values():
        runs = read_results(a), read_results(b)
        found = differences(*runs)
    console = terminal(150)
    engines = list(dict.fromkeys(_engine(row) for row in found))
    words = ("engine", "stage", "figure") if len(engines) > 1 else ("stage", "figure")
    table = readable_table(console, words, ("A", "B", "change", "interval", "B is"))
    for column in table.columns[-2:]:
        column.justify = "left"
    about = f"{b.name} against {a.name}" + (f": {engines[0]}" if len(engines) == 1 else "")
    table.title, table.caption = about, "change: B / A, of the attainment B - A; 95% intervals"
    unknown: dict[str, dict[str, None]] = {}
    for row in found:
        if not every and row.metric not in SHOWN and not row.metric.startswith("highest"):
            continue
        figure = FIGURES.get(row.metric) or _latency(row.metric)
        interval = "-" if row.interval is None else f"{row.interval[0]:.3f} to {row.interval[1]:.3f}"
        table.add_row(
            *([_engine(row)] if len(engines) > 1 else []),
            row.stage,
            figure,
            _figure(row.a),
            _figure(row.b),
            _figure(row.change),
            interval,
            row.outcome,
            style=COLOURS[row.outcome],
        )
        if row.outcome == "unknown":
            unknown.setdefault(row.method, {})[figure] = None
    console.print(table)
    for why, figures in unknown.items():
        console.print(f"unknown: {why} ({', '.join(figures)})", style="dim", markup=False, soft_wrap=True)
    if html:
        with failures():
            write_report(list(runs), [], html)
        typer.echo(f"wrote {html}")


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _engine(row: "Difference") -> str:
    return row.b_target if row.a_target == row.b_target else f"{row.b_target} against {row.a_target}"


def _latency(metric: str) -> str:
    """``TTFT p99 (s)`` of ``ttft_s.p99``; the names of others as they are."""
    name, point, statistic = metric.partition("_s.")
    return f"{name.upper()} {statistic} (s)" if point else metric
