"""`paceline bench report`."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.bench.carry_out import print_results, write_files
from paceline.cli.bench.options import LOAD, OUTPUT, ReportOptions
from paceline.cli.errors import bad_values, failures
from paceline.cli.options import expand


@expand
def report(
    logs: Annotated[list[Path], typer.Argument(help="Raw event logs, or folders of them.")],
    *,
    slo: Annotated[str, typer.Option(metavar="CONSTRAINTS", help="As for the other verbs.", rich_help_panel=LOAD)] = "",
    name: Annotated[str, typer.Option(help="Of the experiment.", rich_help_panel=OUTPUT)] = "report",
    files: ReportOptions,
) -> None:
    """Measure again from LOGS alone."""
    from paceline.lab.results_of_logs import results_of_logs
    from paceline.lab.slo import parse_constraints

    found = [file for path in logs for file in (sorted(path.glob("*.log")) if path.is_dir() else [path])]
    with bad_values():
        constraints = parse_constraints(slo)
    with bad_values(), failures():
        results = results_of_logs(name, found, constraints)
    print_results(results)
    write_files(results, found, files)
