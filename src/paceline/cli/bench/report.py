"""`paceline bench report`."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.bench.carry_out import check_writable, write_and_print
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
    from paceline.lab.results_of_logs import log_files, results_of_logs
    from paceline.lab.slo import parse_constraints

    with bad_values():
        constraints = parse_constraints(slo)
    check_writable(*files.written)
    with bad_values(), failures():
        results = results_of_logs(name, logs, constraints)
    if not write_and_print(results, log_files(logs), files):
        raise typer.Exit(1)
