"""What a user can correct ends in one line and an exit code; only bugs show a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from paceline.checkpoint.error import CheckpointError
from paceline.engine.invalid import InvalidRequest
from paceline.ipc.errors import EngineDead


@contextmanager
def bad_values() -> Iterator[None]:
    """Around the making of configs: a value out of range exits with 2."""
    try:
        yield
    except ValueError as error:
        raise fail(str(error), code=2) from error


@contextmanager
def failures() -> Iterator[None]:
    """Around the work: a model, request, file, server or engine that does not work exits with 1."""
    try:
        yield
    except (CheckpointError, InvalidRequest, EngineDead, OSError) as error:
        raise fail(words(error), code=1) from error


def words(error: Exception) -> str:
    """Of a file: its name and what is wrong with it, without an error number."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def fail(message: str, *, code: int) -> typer.Exit:
    """Prints the message and returns the exception to raise."""
    typer.echo(f"Error: {message}", err=True)
    return typer.Exit(code)
