"""`paceline bench rate`."""

from typing import Annotated

import typer

from paceline.cli.bench.carry_out import carry_out
from paceline.cli.bench.options import (
    LOAD,
    Attainment,
    EnginesOptions,
    FilesOptions,
    LengthsOptions,
    Sending,
    experiment,
    numbers,
)
from paceline.cli.errors import bad_values
from paceline.cli.options import Group, expand
from paceline.lab.experiment import SearchPlan, rate_stages


@expand
def rate(
    *,
    engines: EnginesOptions,
    rates: Annotated[str, typer.Option(metavar="R,...", help="Requests a second.", rich_help_panel=LOAD)] = "1,3,5,6,7",
    lengths: LengthsOptions,
    requests: Annotated[int, typer.Option(min=1, help="Of each rate.", rich_help_panel=LOAD)] = 512,
    find: Annotated[
        float | None,
        typer.Option(min=0, help="Also look for the highest rate, up to this one.", rich_help_panel=LOAD),
    ] = None,
    attainment: Attainment = 0.99,
    sending: Annotated[Sending, Group(Sending(slo="ttft_p99<1s"), LOAD)],
    files: FilesOptions,
) -> None:
    """Poisson arrivals at each rate: TTFT and throughput, and the best under the constraints."""
    with bad_values():
        asked = numbers(rates, float, "--rates")
        search = SearchPlan("rate", min(asked), find, attainment) if find else None
        stages = rate_stages(asked, lengths.input, lengths.output, requests)
        planned = experiment("rate", engines, stages, sending, search)
    carry_out(planned, files)
