"""`paceline bench run`."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.bench.carry_out import Files, carry_out
from paceline.cli.bench.options import Csv, Html, Json, Logs
from paceline.cli.errors import bad_values
from paceline.lab.experiment import read_experiment


def run(
    experiment: Annotated[Path, typer.Argument(help="TOML; docs/lab.md has the keys.")],
    json: Json = None,
    html: Html = None,
    csv: Csv = None,
    logs: Logs = None,
) -> None:
    """Carry out the EXPERIMENT of a file."""
    with bad_values():
        read = read_experiment(experiment)
    carry_out(read, Files(json, html, csv, logs))
