"""Runs an experiment in the terminal: progress while it runs, a table of points, files at the end."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from paceline.cli.bench.options import Files
from paceline.cli.errors import bad_values, fail, failures, words
from paceline.cli.tables import readable_table, terminal
from paceline.lab.experiment import Experiment
from paceline.lab.point import Point
from paceline.lab.stage import WARM_UP

if TYPE_CHECKING:
    from paceline.lab.client.log import StageLog
    from paceline.lab.results import Results
    from paceline.lab.search import SearchResult


def carry_out(experiment: Experiment, files: Files) -> None:
    """Measures and reports. Interrupted, it reports what it has and exits with 130; a point that is not valid or an
    engine that fails makes it exit with 1."""
    from paceline.lab.client.run import Progress as State
    from paceline.lab.run import ExperimentRun
    from paceline.lab.target import Target

    folder = files.logs or Path("bench-logs") / f"{experiment.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    check_writable(*files.written)
    interrupted = False
    with progress_bar() as bar:
        task = bar.add_task("starting", total=None, detail="")

        def on_progress(target: Target, stage: str, state: State) -> None:
            detail = f"{state.sent} sent, {state.failed} failed"
            bar.update(
                task, description=f"{target.name} {stage}", total=state.total, completed=state.ended, detail=detail
            )

        def on_point(target: Target, point: Point) -> None:
            bar.console.print(line_of(point), markup=False, soft_wrap=True)

        with bad_values(), failures():
            run = ExperimentRun(experiment, folder, on_point=on_point, on_progress=on_progress)
        for warning in run.warnings():
            bar.console.print(f"Warning: {warning}", markup=False, soft_wrap=True)
        try:
            with ends_as_interruption():
                run.run()
        except KeyboardInterrupt:
            typer.echo("Interrupted: the report has what was measured until then.", err=True)
            interrupted = True
    for failure in run.results.failures:
        typer.echo(f"Error: {failure}", err=True)
    finish(run.results, run.logs, files, interrupted=interrupted)


@contextmanager
def ends_as_interruption() -> Iterator[None]:
    """Turns SIGTERM and a closed terminal into KeyboardInterrupt, so that servers are stopped and a report is left."""
    ends = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in ends:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in ends:
            signal.signal(number, signal.SIG_DFL)


def finish(results: "Results", logs: list[Path], files: Files, *, interrupted: bool) -> None:
    """Writes and prints what was measured; exits with 130 if it was interrupted, with 1 if something is not right."""
    written = write_and_print(results, logs, files)
    if logs:
        typer.echo(f"logs: {logs[0].parent}")
    if interrupted:
        raise typer.Exit(130)
    if results.failures or not written or not all(point.valid for point in results.points):
        raise typer.Exit(1)


def check_writable(*paths: Path | None) -> None:
    """Before hours of work: makes the files' folders, and exits with 2 if one cannot be written."""
    for path in paths:
        if path is None:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            there = path.exists()
            path.open("ab").close()
            if not there:
                path.unlink()
        except OSError as error:
            raise fail(f"{path} cannot be written: {error.strerror}", code=2) from error


def write_and_print(results: "Results", logs: list[Path], files: Files) -> bool:
    """The files that are asked for, then the table, for whoever reads that may stop at any line.

    Returns:
        Whether all files were written; of one that was not it says so.
    """
    from paceline.lab.results import to_csv, to_json

    written, done = [], True
    for path, write in (
        (files.json, lambda path: path.write_text(to_json(results), encoding="utf-8")),
        (files.csv, lambda path: path.write_text(to_csv(results), encoding="utf-8")),
        (files.html, lambda path: _write_report(results, logs, path)),
    ):
        if path is None:
            continue
        try:
            write(path)
            written.append(path)
        except (OSError, ModuleNotFoundError) as error:
            typer.echo(f"Error: {path} was not written: {words(error)}", err=True)
            done = False
    print_results(results)
    for path in written:
        typer.echo(f"wrote {path}")
    return done


def _write_report(results: "Results", logs: list[Path], out: Path) -> None:
    from paceline.lab.client.log import InvalidLog, read_log
    from paceline.lab.report import write_report

    readable: list[StageLog] = []
    for path in logs:
        try:
            readable.append(read_log(path))
        except (InvalidLog, OSError) as error:
            typer.echo(f"left out of the report: {words(error)}", err=True)
    write_report([results], [log for log in readable if log.stage.name != WARM_UP], out)


def print_results(results: "Results") -> None:
    """The points as a table, and what searches found."""
    from paceline.lab.report.text import error_lines

    console = terminal(140)
    numbers = ("valid", "ok", "failed", "TTFT mean", "p99", "TPOT mean", "p99", "tokens/s", "goodput/s")
    table = readable_table(console, ("engine", "load"), numbers, title=results.experiment)
    table.caption = "Times in ms. TTFT counts from the scheduled send."
    table.columns[2].justify = "left"
    for point in results.points:
        table.add_row(
            point.target,
            point.name + (" (engine)" if point.batch_kind == "engine" else ""),
            "yes" if point.valid else "NO",
            str(point.requests.ok),
            str(point.requests.failed),
            _ms(point.ttft_s.mean),
            _ms(point.ttft_s.p99),
            _ms(point.tpot_s.mean),
            _ms(point.tpot_s.p99),
            _number(point.output_tokens_per_s),
            _number(point.goodput_rps, 2),
            style=None if point.valid else "red",
        )
    if results.points:
        console.print(table)
    for point in results.points:
        for note in point.notes:
            console.print(f"{point.target} {point.name}: {note}", style="dim", markup=False, soft_wrap=True)
        for reason in point.reasons:
            console.print(
                f"{point.target} {point.name} is not valid: {reason}", style="red", markup=False, soft_wrap=True
            )
        for line in error_lines(point):
            console.print(f"{point.target} {point.name}: {line}", style="red", markup=False, soft_wrap=True)
    for line in best_lines(results):
        console.print(line, markup=False, soft_wrap=True)
    for search in results.searches:
        console.print(search_line(search), markup=False, soft_wrap=True)


def best_lines(results: "Results") -> list[str]:
    """For every engine the best of its points that keeps all constraints."""
    if not results.constraints:
        return []
    lines = []
    for target in results.targets:
        points = [point for point in results.points if point.target == target.name]
        if not points:
            continue
        kept = [point for point in points if point.valid and all(point.constraints.values())]
        limits = ", ".join(results.constraints)
        if not kept:
            lines.append(f"{target.name}: no valid point keeps {limits}")
            continue
        best = max(kept, key=lambda point: point.output_tokens_per_s or 0.0)
        lines.append(f"{target.name}: best under {limits}: {best.name}, {_number(best.output_tokens_per_s)} tokens/s")
    return lines


def search_line(search: "SearchResult") -> str:
    unit = "requests/s" if search.over == "rate" else "at once"
    limits = ", ".join(search.constraints)
    if search.ended == "invalid" and search.load is None:
        return f"{search.target}: no load could be measured: {'; '.join(search.notes)}"
    if search.load is None:
        return f"{search.target}: not even the lowest load keeps {limits} for {search.attainment:.0%} of the requests"
    surely = [] if search.kept is None else [f"{search.kept:g} is surely kept"]
    surely.append("no load that was tried breaks" if search.broken is None else f"{search.broken:g} surely breaks")
    return (
        f"{search.target}: {search.load:g} {unit} keep {limits} for {search.attainment:.0%} of the requests "
        f"({search.verdict}; {', '.join(surely)})"
    )


def line_of(point: Point) -> str:
    """What is said of a point as soon as it is measured."""
    verdict = "" if point.valid else f"  NOT VALID: {'; '.join(point.reasons)}"
    return (
        f"{point.target} {point.name}: TTFT {_ms(point.ttft_s.mean)} ms, TPOT {_ms(point.tpot_s.mean)} ms, "
        f"{_number(point.output_tokens_per_s)} tokens/s{verdict}"
    )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.1f}"


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def progress_bar() -> Progress:
    """On standard error, where that is a terminal; tasks have a field ``detail``."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed} of {task.total}"),
        TextColumn("{task.fields[detail]}"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )
