"""`paceline bench replay`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.bench.carry_out import carry_out
from paceline.cli.bench.options import LOAD, EnginesOptions, FilesOptions, Sending, experiment
from paceline.cli.errors import bad_values
from paceline.cli.options import Group, expand
from paceline.lab.experiment import StagePlan


@expand
def replay(
    trace: Annotated[Path, typer.Argument(help="Azure, Mooncake, BurstGPT or Bailian; told by its contents.")],
    *,
    engines: EnginesOptions,
    start: Annotated[
        float, typer.Option(metavar="SECONDS", help="Of the trace: from here.", rich_help_panel=LOAD)
    ] = 0.0,
    end: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Of the trace: up to here.", rich_help_panel=LOAD)
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="The first so many.", rich_help_panel=LOAD)] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Leaves out requests that are longer.", rich_help_panel=LOAD)
    ] = None,
    scale: Annotated[float, typer.Option(min=0.0, help="2: twice the rate.", rich_help_panel=LOAD)] = 1.0,
    jitter: Annotated[
        bool, typer.Option("--jitter", help="Spread the requests of a coarse tick over it.", rich_help_panel=LOAD)
    ] = False,
    sending: Annotated[Sending, Group(Sending(), LOAD)],
    files: FilesOptions,
) -> None:
    """Send the requests of TRACE at its times."""
    workload: dict[str, Any] = {"kind": "trace", "path": str(trace), "start_s": start, "scale": scale, "jitter": jitter}
    given = {"end_s": end, "requests": requests, "max_tokens": max_tokens}
    workload |= {key: value for key, value in given.items() if value is not None}
    with bad_values():
        planned = experiment("replay", engines, [StagePlan(trace.stem, workload, {"kind": "trace"})], sending)
    carry_out(planned, files)
