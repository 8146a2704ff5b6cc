"""`paceline bench engine`."""

from typing import Annotated, Any

import typer

from paceline.cli.bench.carry_out import Files, print_results, write_files
from paceline.cli.bench.options import (
    LOAD,
    Csv,
    Deadline,
    Html,
    Input,
    Json,
    Output,
    Seed,
    Slo,
    TokenIds,
    numbers,
    token_range,
)
from paceline.cli.errors import bad_values, failures
from paceline.cli.options import Knobs, expand
from paceline.engine.config import EngineConfig
from paceline.lab.experiment import StagePlan, batch_stages, rate_stages, read_shapes, throughput_stages, with_prompts


@expand
def engine(
    knobs: Annotated[dict[str, Any], Knobs(EngineConfig, "Engine", leave_out=("model",))],
    model: Annotated[str, typer.Argument(help="Alias (smollm2), folder, GGUF file, or hub id (ORG/NAME).")],
    shapes: Annotated[
        str | None, typer.Option(metavar="INxOUT,...", help="Bursts of these shapes.", rich_help_panel=LOAD)
    ] = None,
    batches: Annotated[
        str | None, typer.Option(metavar="N,...", help="Closed loops of so many requests.", rich_help_panel=LOAD)
    ] = None,
    rates: Annotated[
        str | None, typer.Option(metavar="R,...", help="Poisson arrivals, requests a second.", rich_help_panel=LOAD)
    ] = None,
    input: Input = 2048,
    output: Output = 128,
    requests: Annotated[int, typer.Option(min=1, help="Of each stage.", rich_help_panel=LOAD)] = 64,
    slo: Slo = "",
    token_ids: TokenIds = "1000,31000",
    seed: Seed = 0,
    deadline_s: Deadline = 3600.0,
    json: Json = None,
    html: Html = None,
    csv: Csv = None,
) -> None:
    """Measure MODEL in this process, without HTTP: bursts, closed loops or rates."""
    from paceline.lab.bench_engine import bench_engine
    from paceline.lab.slo import parse_constraints

    with bad_values():
        stages: list[StagePlan] = []
        if shapes:
            stages += throughput_stages(read_shapes(shapes), requests)
        if batches:
            stages += batch_stages(numbers(batches, int, "--batches"), input, output, requests)
        if rates:
            stages += rate_stages(numbers(rates, float, "--rates"), input, output, requests)
        stages = stages or throughput_stages([(input, output)], requests)
        plans = with_prompts(stages, token_range(token_ids), seed, deadline_s)
        constraints = parse_constraints(slo) if slo else []
        config = EngineConfig(model=model, **knobs)
    with bad_values(), failures():
        results = bench_engine(config, plans, constraints)
    print_results(results)
    write_files(results, [], Files(json, html, csv))
    if not all(point.valid for point in results.points):
        raise typer.Exit(1)
