"""`paceline bench fit`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from paceline.cli.bench.carry_out import check_writable
from paceline.cli.errors import bad_values, failures

if TYPE_CHECKING:
    from paceline.lab.client.log import StageLog
    from paceline.simulator.fit_log import LogFit
    from paceline.simulator.fit_steps import StepFit

STAGE_ERRORS = {
    "ttft_mean": "TTFT mean",
    "tpot_mean": "TPOT mean",
    "ttft_each": "TTFT each",
    "tpot_each": "TPOT each",
}
"""Fields of `StageError`, as the table names them."""


def fit(
    files: Annotated[
        list[Path], typer.Argument(help="Raw event logs of one engine, or folders of them; with --steps its step logs.")
    ],
    out: Annotated[Path, typer.Option(help="File for the model.")],
    start: Annotated[
        str, typer.Option(help="Model with the engine's sizes, from which the search starts: a file, or a name.")
    ] = "example",
    steps: Annotated[bool, typer.Option("--steps", help="Fit to step logs (paceline serve --step-log).")] = False,
    name: Annotated[str | None, typer.Option(help="Of the model. Not given: that of the file.")] = None,
    machine: Annotated[str, typer.Option(help="What was measured: GPU, model, precision.")] = "",
) -> None:
    """Fit a step-time model, and say how far it is from what was measured."""
    from paceline.engine.step_log import read_step_log
    from paceline.lab.results_of_logs import stage_logs
    from paceline.lab.simulated import observed
    from paceline.simulator.fit_log import fit_log
    from paceline.simulator.fit_steps import fit_steps
    from paceline.simulator.gpu_model import GpuModel

    check_writable(out)
    with bad_values():
        model = GpuModel.load(start)
    model = replace(model, name=name or out.stem, machine=machine, fitted="", error={})
    table = Table(title=f"{model.name}: simulated against measured, relative error of what was fitted to")
    if steps:
        with bad_values(), failures():
            found = fit_steps([step for file in files for step in read_step_log(file)])
        model = replace(
            model,
            step_time=found.step_time,
            fitted="; ".join(_origin(f"{found.steps} logged steps, {found.left_out} around pauses left out", found)),
            error=found.error,
        )
        table.add_column("of the duration of eight steps")
        table.add_column("error", justify="right")
        for key, value in found.error.items():
            table.add_row(key, f"{value:.1%}")
    else:
        with bad_values(), failures():
            logs = [log for log in stage_logs(files) if any(record.ttft is not None for record in log.records)]
            doubts = list(_doubts(logs))
            for doubt in doubts:
                typer.echo(f"Warning: {doubt}; it is fitted to all the same", err=True)
            with _progress() as news:
                # The logs have no prompts, so that no prefix is shared.
                fitted = fit_log([observed(log) for log in logs], model, prefix_cache=False, on_progress=news)
        errors = {name: [getattr(stage, name) for stage in fitted.stages] for name in STAGE_ERRORS}
        known = {name: [value for value in values if value is not None] for name, values in errors.items()}
        origin = f"event logs of {len(logs)} stages" + (f", {len(doubts)} of them not valid" if doubts else "")
        model = replace(
            fitted.model,
            fitted="; ".join(_origin(f"{origin}, {fitted.simulations} simulations", fitted)),
            error={name: fmean(values) for name, values in known.items() if values},
        )
        table.add_column("stage")
        for title in STAGE_ERRORS.values():
            table.add_column(title, justify="right")
        for log, *values in zip(logs, *errors.values(), strict=True):
            table.add_row(log.stage.name, *("-" if value is None else f"{value:.1%}" for value in values))
    with failures():
        model.save(out)
    Console().print(table)
    if left_open := found.undetermined if steps else fitted.undetermined:
        typer.echo(
            f"Warning: these {'steps' if steps else 'stages'} do not tell {', '.join(left_open)}. Other loads and "
            "lengths may be predicted wrongly; add logs of other ones",
            err=True,
        )
    typer.echo(f"wrote {out}")


def _doubts(logs: Sequence["StageLog"]) -> Iterator[str]:
    """Of the stages whose points are not valid."""
    from paceline.lab.measure import measure

    for log in logs:
        point = measure(log)
        if not point.valid:
            yield f"{log.stage.name} is not valid: {'; '.join(point.reasons)}"


def _origin(text: str, fitted: "LogFit | StepFit") -> Iterator[str]:
    """What the model's file says of where it comes from."""
    yield text
    if fitted.undetermined:
        yield f"not determined: {', '.join(fitted.undetermined)}"


@contextmanager
def _progress() -> Iterator[Callable[[int, float], None]]:
    """Gives what is to be called with the simulations so far and the least error."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("reading logs")

        def news(simulations: int, error: float) -> None:
            so_far = "" if error == float("inf") else f", {error:.1%} from what was measured"
            bar.update(task, description=f"{simulations} simulations{so_far}")

        yield news
