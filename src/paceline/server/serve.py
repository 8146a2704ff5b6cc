"""`serve`: from two configs to a server that runs until a signal ends it."""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn
import uvloop

from paceline.async_llm import AsyncLLM
from paceline.checkpoint.error import CheckpointError
from paceline.engine.config import EngineConfig
from paceline.ipc.errors import EngineDead
from paceline.server.app import create_app
from paceline.server.config import ServerConfig
from paceline.server.service import Service

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 75
"""Longer than the idle time of common clients and proxies, so that they close first and no request meets a closing
connection."""


class StartError(Exception):
    """The server cannot start; the message says why and what to do."""


def serve(engine_config: EngineConfig, server_config: ServerConfig, *, core: str = "paceline.core:build_core") -> None:
    """Serves until SIGTERM or SIGINT, then lets running requests end.

    Args:
        engine_config: what to load.
        server_config: where and how to serve it.
        core: ``module:function`` that builds the core in the engine process.

    Raises:
        SystemExit: with status 1 after a message on standard error, when the server cannot start.
    """
    logging.basicConfig(
        level=server_config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    try:
        uvloop.run(_serve(engine_config, server_config, core))
    except (StartError, CheckpointError, EngineDead) as error:
        print(f"paceline cannot start: {error}", file=sys.stderr)
        raise SystemExit(1) from None


async def _serve(engine_config: EngineConfig, config: ServerConfig, core: str) -> None:
    with _listening(config) as listener, _Stop() as stop:
        llm = AsyncLLM(engine_config, core=core)
        if await stop.interrupts(llm.start()):
            # A download goes on in a thread that nothing can cancel, and asyncio would wait for it.
            logging.shutdown()
            os._exit(0)
        try:
            await _serve_started(llm, config, listener, stop)
        finally:
            await llm.close()


async def _serve_started(llm: AsyncLLM, config: ServerConfig, listener: socket.socket, stop: "_Stop") -> None:
    app = create_app(llm, config)
    service: Service = app.state.service
    server = _Server(
        uvicorn.Config(
            app,
            loop="none",
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=config.log_level,
            access_log=config.access_log,
            root_path=config.root_path,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(config.exit_timeout_s)),
        ),
        _url(config, listener),
        service.names[0],
    )
    running = asyncio.create_task(server.serve([listener]))
    try:
        await asyncio.wait({running, stop.first}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            log.info("shutting down: open requests have %g s; a second signal ends them", config.drain_timeout_s)
            await service.drain(config.drain_timeout_s, stop.second)
        server.should_exit = True
        await running
    finally:
        service.close()


class _Server(uvicorn.Server):
    """Leaves signals to us, and says when it is ready."""

    def __init__(self, config: uvicorn.Config, url: str, model: str) -> None:
        super().__init__(config)
        self._url = url
        self._model = model

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as error:
            raise StartError(f"cannot listen on {self._url}: {error.strerror}") from error
        print(f"paceline serves {self._model} at {self._url}/v1 (Ctrl-C ends it)", flush=True)


class _Stop:
    """The first and the second SIGTERM or SIGINT, as futures."""

    def __enter__(self) -> "_Stop":
        self._loop = asyncio.get_running_loop()
        self.first: asyncio.Future[None] = self._loop.create_future()
        self.second: asyncio.Future[None] = self._loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)

    async def interrupts(self, work: Coroutine[Any, Any, None]) -> bool:
        """Runs ``work`` to its end, or cancels it at the first signal; whether it was cancelled."""
        task = asyncio.create_task(work)
        await asyncio.wait({task, self.first}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
            return False
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        return True

    def _signal(self) -> None:
        future = self.second if self.first.done() else self.first
        if not future.done():
            future.set_result(None)


@contextmanager
def _listening(config: ServerConfig) -> Iterator[socket.socket]:
    """The bound socket. Bound before the model loads, so that a port in use is known at once; clients can connect
    only once the server is ready."""
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartError(f"the host {config.host!r} is no address of this machine: {error.strerror}") from error
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it: without it every other small write waits 40 ms for an acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            listener.bind(address)
        except OSError as error:
            raise StartError(
                f"cannot listen on {config.host} port {config.port}: {error.strerror}; choose another with --port"
            ) from error
        yield listener


def _url(config: ServerConfig, listener: socket.socket) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http://{host}:{listener.getsockname()[1]}"
