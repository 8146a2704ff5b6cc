"""`paceline bench run`."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.bench.carry_out import carry_out
from paceline.cli.bench.options import FilesOptions
from paceline.cli.errors import bad_values
from paceline.cli.options import expand
from paceline.lab.experiment import read_experiment


@expand
def run(
    experiment: Annotated[Path, typer.Argument(help="TOML; docs/lab.md has the keys.")],
    files: FilesOptions,
) -> None:
    """Carry out the EXPERIMENT of a file."""
    with bad_values():
        planned = read_experiment(experiment)
    carry_out(planned, files)
