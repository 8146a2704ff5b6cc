"""One process's HTTP: the app on a socket, until it is asked to stop."""

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from paceline.async_llm import AsyncLLM
from paceline.engine.collector import calm_collector
from paceline.server.app import create_app
from paceline.server.config import ServerConfig
from paceline.server.listener import StartError, url
from paceline.server.metrics import Metrics
from paceline.server.service import Service
from paceline.server.stop import Stop

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 75
"""Longer than the idle time of common clients and proxies, so that they close first and no request meets a closing
connection."""


async def serve_http(
    llm: AsyncLLM,
    config: ServerConfig,
    listener: socket.socket,
    stop: Stop,
    metrics: Metrics,
    on_ready: Callable[[], None],
) -> None:
    """Serves a started ``llm`` on a bound socket until asked to stop. Raises StartError when it cannot listen there."""
    app = create_app(llm, config, metrics)
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
        url(config, listener),
        on_ready,
    )
    calm_collector()
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

    def __init__(self, config: uvicorn.Config, address: str, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._address = address
        self._on_ready = on_ready

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as error:
            raise StartError(f"cannot listen on {self._address}: {error.strerror}") from error
        self._on_ready()
