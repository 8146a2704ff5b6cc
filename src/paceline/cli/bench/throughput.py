"""`paceline bench throughput`."""

from typing import Annotated

import typer

from paceline.cli.bench.carry_out import carry_out
from paceline.cli.bench.options import LOAD, EnginesOptions, FilesOptions, Sending, experiment
from paceline.cli.errors import bad_values
from paceline.cli.options import Group, expand
from paceline.lab.experiment import read_shapes, throughput_stages


@expand
def throughput(
    *,
    engines: EnginesOptions,
    shapes: Annotated[
        str, typer.Option(metavar="INxOUT,...", help="Input and output tokens of each workload.", rich_help_panel=LOAD)
    ] = "128x128,2048x128,128x2048,2048x2048",
    requests: Annotated[int, typer.Option(min=1, help="Of each workload.", rich_help_panel=LOAD)] = 4096,
    sending: Annotated[Sending, Group(Sending(), LOAD)],
    files: FilesOptions,
) -> None:
    """Burst of requests at each shape: throughput and TPOT per workload."""
    with bad_values():
        stages = throughput_stages(read_shapes(shapes), requests)
        planned = experiment("throughput", engines, stages, sending)
    carry_out(planned, files)
