"""`paceline bench throughput`."""

from typing import Annotated

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
from paceline.lab.experiment import Experiment, read_shapes, throughput_stages, with_prompts


def throughput(
    url: Urls = None,
    model: Model = "default",
    command: Command = None,
    api_key: ApiKey = None,
    shapes: Annotated[
        str, typer.Option(metavar="INxOUT,...", help="Input and output tokens of each workload.", rich_help_panel=LOAD)
    ] = "128x128,2048x128,128x2048,2048x2048",
    requests: Annotated[int, typer.Option(min=1, help="Of each workload.", rich_help_panel=LOAD)] = 4096,
    slo: Slo = "",
    token_ids: TokenIds = "1000,31000",
    seed: Seed = 0,
    deadline_s: Deadline = 3600.0,
    workers: Workers = None,
    warmup: Warmup = 4,
    json: Json = None,
    html: Html = None,
    csv: Csv = None,
    logs: Logs = None,
) -> None:
    """Burst of requests at each shape: throughput and TPOT per workload."""
    with bad_values():
        search = None
        stages = throughput_stages(read_shapes(shapes), requests)
        experiment = Experiment(
            name="throughput",
            targets=targets(url, model, command, api_key),
            stages=with_prompts(stages, token_range(token_ids), seed, deadline_s),
            slo=slo,
            search=search,
            workers=workers,
            warmup=warmup,
        )
    carry_out(experiment, Files(json, html, csv, logs))
