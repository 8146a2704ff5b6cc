"""`paceline bench batch`."""

from typing import Annotated

import typer

from paceline.cli.bench.carry_out import carry_out
from paceline.cli.bench.options import (
    LOAD,
    Attainment,
    BatchEnginesOptions,
    FilesOptions,
    LengthsOptions,
    Sending,
    experiment,
    numbers,
)
from paceline.cli.errors import bad_values
from paceline.cli.options import Group, expand
from paceline.lab.experiment import SearchPlan, batch_stages


@expand
def batch(
    *,
    engines: BatchEnginesOptions,
    batches: Annotated[
        str, typer.Option(metavar="N,...", help="Requests at once.", rich_help_panel=LOAD)
    ] = "1,2,4,8,16,32,64",
    lengths: LengthsOptions,
    requests: Annotated[
        int | None,
        typer.Option(min=1, help="Of each batch size. Not given: four rounds, 16 at least.", rich_help_panel=LOAD),
    ] = None,
    find: Annotated[
        int | None, typer.Option(min=1, help="Also look for the largest batch, up to this one.", rich_help_panel=LOAD)
    ] = None,
    attainment: Attainment = 0.99,
    sending: Annotated[Sending, Group(Sending(slo="tpot_mean<20ms"), LOAD)],
    files: FilesOptions,
) -> None:
    """Closed loop at each batch size: TPOT and throughput, and the best under the constraints."""
    with bad_values():
        search = SearchPlan("batch", 1, find, attainment) if find else None
        stages = batch_stages(numbers(batches, int, "--batches"), lengths.input, lengths.output, requests)
        planned = experiment("batch", engines, stages, sending, search)
    carry_out(planned, files)
