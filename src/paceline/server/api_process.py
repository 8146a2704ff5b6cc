"""One of several processes that serve HTTP for one engine. Started by `paceline.server.api_processes`."""

import asyncio
import faulthandler
import logging
import signal
import socket
import sys
from pathlib import Path

import msgspec
import uvloop

from paceline.async_llm import AsyncLLM
from paceline.checkpoint.error import CheckpointError
from paceline.engine.config import EngineConfig
from paceline.ipc.errors import EngineDead
from paceline.ipc.messages import Seat
from paceline.server.config import ServerConfig
from paceline.server.http import serve_http
from paceline.server.listener import StartError
from paceline.server.metrics import Metrics, make_board
from paceline.server.stop import Stop

MAX_LAUNCH_BYTES = 2**24
READY = b"ready\n"
STOP = b"stop\n"


class ApiLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """The first line on standard input, as JSON: arguments would be in the list of processes, and there are keys in it.
    Every line `STOP` after it asks to stop; the end of the input means that the parent is gone. The process answers
    with one line, `READY`, when it takes requests."""

    engine: EngineConfig
    server: ServerConfig
    seat: Seat
    listener: int
    """File descriptor of the bound socket, which all processes share."""
    process: int
    """Number of this process, from 0."""
    processes: int

    @property
    def board(self) -> Path:
        return Path(self.seat.folder) / "board"


async def _run() -> None:
    reader = asyncio.StreamReader(limit=MAX_LAUNCH_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    launch = msgspec.json.decode(await reader.readline(), type=ApiLaunch)
    logging.basicConfig(
        level=launch.server.log_level.upper(),
        format=f"%(asctime)s %(levelname)s API process {launch.process} %(name)s: %(message)s",
        force=True,
    )
    stop = Stop()
    following = asyncio.create_task(_follow(reader, stop))
    llm = AsyncLLM(launch.engine, join=launch.seat)
    if await stop.interrupts(llm.start()):
        return
    metrics = Metrics(make_board(launch.processes, launch.board), launch.process)
    listener = socket.socket(fileno=launch.listener)
    try:
        await serve_http(llm, launch.server, listener, stop, metrics, _say_ready)
    finally:
        await llm.close()
        following.cancel()


async def _follow(reader: asyncio.StreamReader, stop: Stop) -> None:
    while await reader.readline():
        stop.ask()
    for _ in range(2):
        stop.ask()


def _say_ready() -> None:
    sys.stdout.buffer.write(READY)
    sys.stdout.flush()


if __name__ == "__main__":
    # Ctrl-C and a service manager's SIGTERM reach the whole group; the parent decides what they mean.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    try:
        uvloop.run(_run())
    except (CheckpointError, EngineDead, StartError) as error:
        print(f"an API process cannot start: {error}", file=sys.stderr)
        sys.exit(1)
