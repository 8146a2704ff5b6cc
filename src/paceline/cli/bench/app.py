"""`paceline bench`: measures engines under service constraints."""

import typer

from paceline.cli.bench.batch import batch
from paceline.cli.bench.compare import compare
from paceline.cli.bench.engine import engine
from paceline.cli.bench.fit import fit
from paceline.cli.bench.rate import rate
from paceline.cli.bench.replay import replay
from paceline.cli.bench.report import report
from paceline.cli.bench.run import run
from paceline.cli.bench.throughput import throughput

bench = typer.Typer(name="bench", help="Measure engines under service constraints.", no_args_is_help=True)
for verb in (throughput, batch, rate, replay, run, engine, report, compare, fit):
    bench.command()(verb)
