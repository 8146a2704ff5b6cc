"""`paceline bench engine`."""

from typing import Annotated, Any

import typer

from paceline.cli.bench.carry_out import check_writable, finish, line_of, progress_bar
from paceline.cli.bench.options import LOAD, LengthsOptions, ReportOptions, Sending, numbers
from paceline.cli.errors import bad_values, failures
from paceline.cli.options import Group, Knobs, expand
from paceline.engine.config import EngineConfig
from paceline.lab.experiment import StagePlan, batch_stages, rate_stages, read_shapes, throughput_stages
from paceline.lab.stage import Stage


@expand
def engine(
    model: Annotated[str, typer.Argument(help="Alias (smollm2), folder, GGUF file, or hub id (ORG/NAME).")],
    *,
    knobs: Annotated[dict[str, Any], Knobs(EngineConfig, "Engine", leave_out=("model",))],
    shapes: Annotated[
        str | None, typer.Option(metavar="INxOUT,...", help="Bursts of these shapes.", rich_help_panel=LOAD)
    ] = None,
    batches: Annotated[
        str | None, typer.Option(metavar="N,...", help="Closed loops of so many requests.", rich_help_panel=LOAD)
    ] = None,
    rates: Annotated[
        str | None, typer.Option(metavar="R,...", help="Poisson arrivals, requests a second.", rich_help_panel=LOAD)
    ] = None,
    lengths: LengthsOptions,
    requests: Annotated[int, typer.Option(min=1, help="Of each stage.", rich_help_panel=LOAD)] = 64,
    sending: Annotated[Sending, Group(Sending(), LOAD, leave_out=("workers", "warmup"))],
    files: ReportOptions,
) -> None:
    """Measure MODEL in this process, without HTTP: bursts, closed loops or rates."""
    from paceline.lab.bench_engine import bench_engine
    from paceline.lab.slo import parse_constraints

    with bad_values():
        stages: list[StagePlan] = []
        if shapes:
            stages += throughput_stages(read_shapes(shapes), requests)
        if batches:
            stages += batch_stages(numbers(batches, int, "--batches"), lengths.input, lengths.output, requests)
        if rates:
            stages += rate_stages(numbers(rates, float, "--rates"), lengths.input, lengths.output, requests)
        stages = stages or throughput_stages([(lengths.input, lengths.output)], requests)
        plans = sending.stages(stages)
        constraints = parse_constraints(sending.slo)
        config = EngineConfig(model=model, **knobs)
    check_writable(*files.written)
    results, bar = None, progress_bar()
    task = bar.add_task("", total=None, detail="")

    def on_progress(stage: Stage, ended: int) -> None:
        bar.start()  # Not before: loading shows a bar of its own.
        bar.update(task, description=stage.name, total=len(stage.requests), completed=ended)

    try:
        with bad_values(), failures():
            for results in bench_engine(config, plans, constraints, on_progress):
                bar.console.print(line_of(results.points[-1]), markup=False, soft_wrap=True)
    except KeyboardInterrupt:
        typer.echo("Interrupted: the report has what was measured before.", err=True)
        if results is None:
            raise typer.Exit(130) from None
    finally:
        bar.stop()
    assert results is not None
    finish(results, [], files, interrupted=results.interrupted)
