"""`paceline bench rate`."""

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
from paceline.lab.experiment import Experiment, SearchPlan, rate_stages, with_prompts


def rate(
    url: Urls = None,
    model: Model = "default",
    command: Command = None,
    api_key: ApiKey = None,
    rates: Annotated[str, typer.Option(metavar="R,...", help="Requests a second.", rich_help_panel=LOAD)] = "1,3,5,6,7",
    input: Input = 2048,
    output: Output = 128,
    requests: Annotated[int, typer.Option(min=1, help="Of each rate.", rich_help_panel=LOAD)] = 512,
    find: Annotated[
        float | None,
        typer.Option(min=0, help="Also look for the highest rate, up to this one.", rich_help_panel=LOAD),
    ] = None,
    attainment: Attainment = 0.99,
    slo: Slo = "ttft_p99<1s",
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
    """Poisson arrivals at each rate: TTFT and throughput, and the best under the constraints."""
    with bad_values():
        asked = numbers(rates, float, "--rates")
        search = SearchPlan("rate", min(asked), find, attainment) if find else None
        stages = rate_stages(asked, input, output, requests)
        experiment = Experiment(
            name="rate",
            targets=targets(url, model, command, api_key),
            stages=with_prompts(stages, token_range(token_ids), seed, deadline_s),
            slo=slo,
            search=search,
            workers=workers,
            warmup=warmup,
        )
    carry_out(experiment, Files(json, html, csv, logs))
