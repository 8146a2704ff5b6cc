"""`paceline bench batch`."""

from typing import Annotated

import typer

from paceline.cli.bench.carry_out import Files, carry_out
from paceline.cli.bench.options import (
    LOAD,
    ApiKey,
    Attainment,
    Command,
    Csv,
    Deadline,
    Html,
    Input,
    Json,
    Logs,
    Model,
    Output,
    Seed,
    Slo,
    TokenIds,
    Urls,
    Warmup,
    Workers,
    numbers,
    targets,
    token_range,
)
from paceline.cli.errors import bad_values
from paceline.lab.experiment import Experiment, SearchPlan, batch_stages, with_prompts


def batch(
    url: Urls = None,
    model: Model = "default",
    command: Command = None,
    api_key: ApiKey = None,
    batches: Annotated[
        str, typer.Option(metavar="N,...", help="Requests at once.", rich_help_panel=LOAD)
    ] = "1,2,4,8,16,32,64",
    input: Input = 2048,
    output: Output = 128,
    requests: Annotated[
        int | None,
        typer.Option(min=1, help="Of each batch size. Not given: four rounds, 16 at least.", rich_help_panel=LOAD),
    ] = None,
    find: Annotated[
        int | None, typer.Option(min=1, help="Also look for the largest batch, up to this one.", rich_help_panel=LOAD)
    ] = None,
    attainment: Attainment = 0.99,
    slo: Slo = "tpot_mean<20ms",
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
    """Closed loop at each batch size: TPOT and throughput, and the best under the constraints."""
    with bad_values():
        search = SearchPlan("batch", 1, find, attainment) if find else None
        stages = batch_stages(numbers(batches, int, "--batches"), input, output, requests)
        experiment = Experiment(
            name="batch",
            targets=targets(url, model, command, api_key),
            stages=with_prompts(stages, token_range(token_ids), seed, deadline_s),
            slo=slo,
            search=search,
            workers=workers,
            warmup=warmup,
        )
    carry_out(experiment, Files(json, html, csv, logs))
