"""`paceline bench replay`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.bench.carry_out import Files, carry_out
from paceline.cli.bench.options import (
    LOAD,
    ApiKey,
    Command,
    Csv,
    Deadline,
    Html,
    Json,
    Logs,
    Model,
    Seed,
    Slo,
    TokenIds,
    Urls,
    Warmup,
    Workers,
    targets,
    token_range,
)
from paceline.cli.errors import bad_values
from paceline.lab.experiment import Experiment, StagePlan, with_prompts

Seconds = Annotated[float, typer.Option(metavar="SECONDS", help="Of the trace: from here.", rich_help_panel=LOAD)]


def replay(
    trace: Annotated[Path, typer.Argument(help="Azure, Mooncake, BurstGPT or Bailian; told by its contents.")],
    url: Urls = None,
    model: Model = "default",
    command: Command = None,
    api_key: ApiKey = None,
    start: Seconds = 0.0,
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
    slo: Slo = "",
    token_ids: TokenIds = "1000,31000",
    seed: Seed = 0,
    deadline_s: Deadline = 7200.0,
    workers: Workers = None,
    warmup: Warmup = 4,
    json: Json = None,
    html: Html = None,
    csv: Csv = None,
    logs: Logs = None,
) -> None:
    """Send the requests of TRACE at its times."""
    workload: dict[str, Any] = {"kind": "trace", "path": str(trace), "start_s": start, "scale": scale, "jitter": jitter}
    given = {"end_s": end, "requests": requests, "max_tokens": max_tokens}
    workload |= {key: value for key, value in given.items() if value is not None}
    with bad_values():
        stages = [StagePlan(trace.stem, workload, {"kind": "trace"})]
        experiment = Experiment(
            name="replay",
            targets=targets(url, model, command, api_key),
            stages=with_prompts(stages, token_range(token_ids), seed, deadline_s),
            slo=slo,
            workers=workers,
            warmup=warmup,
        )
    carry_out(experiment, Files(json, html, csv, logs))
