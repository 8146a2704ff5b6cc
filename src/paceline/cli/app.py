"""The `paceline` command. Nothing heavy is imported before a verb runs."""

from importlib.metadata import version
from typing import Annotated

import typer

from paceline.cli.bench.app import bench
from paceline.cli.chat import chat
from paceline.cli.recommend import recommend
from paceline.cli.serve import serve
from paceline.cli.simulate import simulate

app = typer.Typer(
    help="Serve large language models at a promised pace.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(serve)
app.command()(chat)
app.command()(simulate)
app.command()(recommend)
app.add_typer(bench)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paceline {version('paceline')}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    pass


def main() -> None:
    app()
