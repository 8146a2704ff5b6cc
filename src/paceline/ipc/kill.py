"""Ending another process at once."""

from asyncio.subprocess import Process
from contextlib import suppress


def kill(process: Process) -> None:
    """`Process.kill` for a process that may just have ended: uvloop's raises then."""
    with suppress(ProcessLookupError):
        process.kill()
