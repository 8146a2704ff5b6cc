"""`paceline bench fit`."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from paceline.cli.errors import bad_values, failures


def fit(
    files: Annotated[list[Path], typer.Argument(help="Raw event logs of one engine, or one step log of the engine.")],
    out: Annotated[Path, typer.Option(help="File for the model.")],
    start: Annotated[
        str, typer.Option(help="Model with the engine's sizes, from which the search starts: a file, or a name.")
    ] = "example",
    steps: Annotated[bool, typer.Option("--steps", help="The file is a step log (paceline serve --step-log).")] = False,
    name: Annotated[str | None, typer.Option(help="Of the model. Not given: that of the file.")] = None,
    machine: Annotated[str, typer.Option(help="What was measured: GPU, model, precision.")] = "",
) -> None:
    """Fit a step-time model, and say how far it is from what was measured."""
    from paceline.engine.step_log import read_step_log
    from paceline.lab.client.log import read_log
    from paceline.lab.simulated import observed
    from paceline.simulator.fit_log import fit_log
    from paceline.simulator.fit_steps import fit_steps
    from paceline.simulator.gpu_model import GpuModel

    with bad_values():
        model = GpuModel.load(start)
    model = replace(model, name=name or out.stem, machine=machine or model.machine)
    table = Table(title=f"{model.name}: simulated against measured, relative error")
    if steps:
        with bad_values(), failures():
            found = fit_steps([step for file in files for step in read_step_log(file)])
        model = replace(
            model,
            step_time=found.step_time,
            fitted=f"{found.steps} logged steps, {found.left_out} pauses left out",
            error=found.error,
        )
        table.add_column("of a step's duration")
        table.add_column("error", justify="right")
        for key, value in found.error.items():
            table.add_row(key, f"{value:.1%}")
    else:
        with bad_values(), failures():
            logs = [read_log(file) for file in files]
            fitted = fit_log([observed(log) for log in logs], model)
        model = replace(fitted.model, fitted=f"event logs of {len(logs)} stages, {fitted.simulations} simulations")
        for title in ("stage", "TTFT mean", "TPOT mean", "TTFT each", "TPOT each"):
            table.add_column(title, justify="left" if title == "stage" else "right")
        for log, errors in zip(logs, fitted.stages, strict=True):
            values = (errors.ttft_mean, errors.tpot_mean, errors.ttft_each, errors.tpot_each)
            table.add_row(log.stage.name, *("-" if value is None else f"{value:.1%}" for value in values))
    model.save(out)
    Console().print(table)
    typer.echo(f"wrote {out}")
