"""`paceline bench report`."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.bench.carry_out import Files, print_results, write_files
from paceline.cli.bench.options import LOAD, OUTPUT, Csv, Html, Json
from paceline.cli.errors import bad_values, failures


def report(
    logs: Annotated[list[Path], typer.Argument(help="Raw event logs, or folders of them.")],
    slo: Annotated[str, typer.Option(metavar="CONSTRAINTS", help="As for the other verbs.", rich_help_panel=LOAD)] = "",
    name: Annotated[str, typer.Option(help="Of the experiment.", rich_help_panel=OUTPUT)] = "report",
    json: Json = None,
    html: Html = None,
    csv: Csv = None,
) -> None:
    """Measure again from LOGS alone."""
    from paceline.lab.results_of_logs import results_of_logs
    from paceline.lab.slo import parse_constraints

    files = [file for path in logs for file in (sorted(path.glob("*.log")) if path.is_dir() else [path])]
    with bad_values():
        constraints = parse_constraints(slo) if slo else []
    with bad_values(), failures():
        results = results_of_logs(name, files, constraints)
    print_results(results)
    write_files(results, files, Files(json, html, csv))
