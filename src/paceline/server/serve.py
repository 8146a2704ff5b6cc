"""`serve`: from two configs to a server that runs until a signal ends it."""

import asyncio
import logging
import os
import resource
import socket
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import uvloop

from paceline.async_llm import AsyncLLM
from paceline.checkpoint.error import CheckpointError
from paceline.engine.config import EngineConfig
from paceline.ipc.errors import EngineDead
from paceline.server.api_processes import ApiProcesses
from paceline.server.config import ServerConfig
from paceline.server.http import serve_http
from paceline.server.listener import StartError, bound, url
from paceline.server.metrics import Metrics
from paceline.server.socket_log import LoggedListener, SocketLog
from paceline.server.stop import StopBySignal


def serve(
    engine_config: EngineConfig, server_config: ServerConfig, *, core: str = "paceline.core:build_served_core"
) -> None:
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
    # Each connection is a file, and the usual limit of 1,024 is less than a server may have.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    run = uvloop.run if server_config.socket_log is None else asyncio.run
    try:
        run(_serve(engine_config, server_config, core))
    except (StartError, CheckpointError, EngineDead) as error:
        print(f"paceline cannot start: {error}", file=sys.stderr)
        raise SystemExit(1) from None


async def _serve(engine_config: EngineConfig, config: ServerConfig, core: str) -> None:
    processes = config.api_processes or default_processes(len(os.sched_getaffinity(0)))
    if config.socket_log is not None:
        processes = 1
    config = replace(config, served_model_names=config.served_model_names or (engine_config.model,))
    with bound(config) as listener, StopBySignal() as stop:
        ready = f"paceline serves {config.served_model_names[0]} at {url(config, listener)}/v1 (Ctrl-C ends it)"
        if processes == 1:
            llm = AsyncLLM(engine_config, core=core)
            if await stop.interrupts(llm.start()):
                _leave()
            try:
                with _logged(config, listener) as sockets:
                    await serve_http(llm, config, sockets, stop, Metrics(), lambda: print(ready, flush=True))
            finally:
                await llm.close()
        else:
            server = ApiProcesses(engine_config, config, core, listener, processes)
            try:
                if await stop.interrupts(server.start()):
                    await server.close()
                    _leave()
                print(ready, flush=True)
                await server.run(stop.first)
                await server.drain(stop.second)
            finally:
                await server.close()


@contextmanager
def _logged(config: ServerConfig, listener: socket.socket) -> Iterator[socket.socket]:
    """The listener, with a log of what happens on its connections if ``config`` asks for one."""
    if config.socket_log is None:
        yield listener
        return
    try:
        log = SocketLog(Path(config.socket_log))
    except OSError as error:
        raise StartError(f"socket_log: cannot write {config.socket_log}: {error.strerror}") from error
    with closing(log), LoggedListener(listener, log) as logged:
        yield logged


def default_processes(cores: int) -> int:
    """One for every four cores, at most four: the engine and the tokenizer's threads need some too."""
    return max(1, min(4, cores // 4))


def _leave() -> NoReturn:
    # A download goes on in a thread that nothing can cancel, and asyncio would wait for it.
    logging.shutdown()
    os._exit(0)
