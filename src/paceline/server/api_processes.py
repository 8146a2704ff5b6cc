"""Several processes that serve HTTP on one socket for one engine, because one Python process makes only so many chunks
a second. This process starts them and the engine, and serves nothing itself.

They share the listening socket: whoever has time takes the next connection. Each joins the engine process as a client
of its own, which gets its own requests' outputs and nothing else. Metrics and limits are shared through a `Board`.
"""

import asyncio
import itertools
import logging
import os
import socket
import sys
from asyncio.subprocess import PIPE, Process
from dataclasses import replace
from typing import Any

import msgspec

from paceline.checkpoint.source import locate
from paceline.engine.config import EngineConfig
from paceline.ipc.client import EngineClient
from paceline.ipc.kill import kill
from paceline.ipc.messages import Seat
from paceline.ipc.progress import StartProgress
from paceline.server.api_process import READY, STOP, ApiLaunch
from paceline.server.config import ServerConfig
from paceline.server.listener import StartError

log = logging.getLogger(__name__)

RESTART_S = 1.0
"""Pause before a process that ended is started again."""
MARGIN_S = 5.0
"""How much longer than its own limits a process may take to stop before it is killed."""


class ApiProcesses:
    """A server of several processes.

    Args:
        engine: what to load.
        config: of the server.
        core: ``module:function`` that builds the core in the engine process.
        listener: bound.
        count: of processes that serve HTTP.
    """

    def __init__(
        self, engine: EngineConfig, config: ServerConfig, core: str, listener: socket.socket, count: int
    ) -> None:
        self._engine = engine
        self._config = config
        self._core = core
        self._listener = listener
        self._count = count
        self._numbers = itertools.count(1)
        self._client: EngineClient | None = None
        self._running: dict[int, Process] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False

    async def start(self) -> None:
        """Returns when all processes are ready.

        Raises:
            CheckpointError, EngineDead, StartError: with the reason, when that fails. Call `close` then.
        """
        self._engine = replace(self._engine, model=str(await asyncio.to_thread(locate, self._engine.model)))
        with StartProgress() as progress:
            self._client = client = EngineClient(self._engine, core=self._core, on_progress=progress)
            await client.spawn()
            ready = [asyncio.Event() for _ in range(self._count)]
            self._tasks = [asyncio.create_task(self._keep(client, i, event)) for i, event in enumerate(ready)]
            await client.ready()
        all_ready = asyncio.ensure_future(asyncio.gather(*(event.wait() for event in ready)))
        try:
            await self.run(all_ready)
        finally:
            all_ready.cancel()

    async def run(self, until: asyncio.Future[Any]) -> None:
        """Returns when ``until`` is done. Raises what makes it impossible to keep the processes running."""
        await asyncio.wait({until, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in self._tasks:
            if task.done():
                task.result()

    async def drain(self, hurry: asyncio.Future[None]) -> None:
        """Asks all processes to stop, and again when ``hurry`` is done; returns when they have, or did not in time."""
        self._stopping = True
        self._listener.close()
        patience = self._config.exit_timeout_s + MARGIN_S
        everyone: asyncio.Future[Any] = asyncio.ensure_future(asyncio.wait(self._tasks))
        either: set[asyncio.Future[Any]] = {everyone, hurry}
        self._ask()
        await asyncio.wait(either, timeout=self._config.drain_timeout_s + patience, return_when=asyncio.FIRST_COMPLETED)
        self._ask()
        await asyncio.wait({everyone}, timeout=patience)
        everyone.cancel()

    async def close(self) -> None:
        """Ends everything that is left, at once. May be called again."""
        self._stopping = True
        for process in self._running.values():
            kill(process)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.close()

    def _ask(self) -> None:
        for process in self._running.values():
            assert process.stdin is not None
            process.stdin.write(STOP)

    async def _keep(self, client: EngineClient, index: int, ready: asyncio.Event) -> None:
        """Keeps process ``index`` running. A new one is a new client: the dead one's requests are its own."""
        while not self._stopping:
            number = next(self._numbers)
            client.admit(number)
            process = await self._spawn(Seat(client.folder, number), index)
            self._running[index] = process
            try:
                assert process.stdout is not None
                if await process.stdout.readline() == READY:
                    ready.set()
                status = await process.wait()
            finally:
                del self._running[index]
                client.dismiss(number)
            if self._stopping:
                return
            if not ready.is_set():
                raise StartError(f"API process {index} exited with status {status}; its last words are above")
            log.error("API process %d exited with status %d and is started again", index, status)
            await asyncio.sleep(RESTART_S)

    async def _spawn(self, seat: Seat, index: int) -> Process:
        listener = self._listener.fileno()
        launch = ApiLaunch(
            engine=self._engine,
            server=self._config,
            seat=seat,
            listener=listener,
            process=index,
            processes=self._count,
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "paceline.server.api_process",
            stdin=PIPE,
            stdout=PIPE,
            pass_fds=[listener],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(launch) + b"\n")
        return process
