"""The engine process: runs the core's loop and answers the clients. Started by `paceline.ipc.client`."""

import faulthandler
import importlib
import logging
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import zmq

from paceline.checkpoint.error import CheckpointError
from paceline.engine.collector import calm_collector
from paceline.engine.config import InvalidConfig
from paceline.engine.request import CoreStats, Request
from paceline.ipc.messages import (
    CLIENT_SHIFT,
    Abort,
    Add,
    Beat,
    Failed,
    Join,
    Launch,
    Leave,
    Loading,
    Outputs,
    Ready,
    Shutdown,
    ToClient,
    ToEngine,
    client_address,
    engine_address,
)

if TYPE_CHECKING:
    from paceline.core import EngineCore

log = logging.getLogger("paceline.ipc.process")

LINGER_MS = 2000
"""Longest wait at exit for the clients to take the last messages."""


@dataclass(slots=True)
class Progress:
    """What the loop is doing; the loop writes it, the heartbeat reads it."""

    step_began: float | None = None
    leaks: int = 0
    stats: CoreStats = field(default_factory=CoreStats)


class Outboxes:
    """The sockets to all clients. The lock makes them fit for two threads, the loop's and the heartbeat's."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", launch: Launch) -> None:
        self._context = context
        self._launch = launch
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()
        self.join(0)

    def __contains__(self, client: int) -> bool:
        return client in self._sockets

    def join(self, client: int) -> None:
        socket = self._context.socket(zmq.PUSH)
        socket.sndhwm = 0
        socket.connect(client_address(self._launch.folder, client))
        with self._lock:
            self._sockets[client] = socket

    def leave(self, client: int) -> None:
        with self._lock:
            self._sockets.pop(client).close(linger=0)

    def send(self, client: int, message: ToClient) -> None:
        """Does nothing for a client that has left."""
        with self._lock:
            if client in self._sockets:
                self._sockets[client].send(self._encoder.encode(message))

    def send_all(self, make: Callable[[], ToClient]) -> None:
        """Sends what ``make`` returns. It is called when nobody else sends, so that news never arrives after newer
        news."""
        with self._lock:
            frame = self._encoder.encode(make())
            for socket in self._sockets.values():
                socket.send(frame)


class EngineLoop:
    """Messages in, one step, one message out to each client that the step brought something; waits for messages when
    there is nothing to do."""

    def __init__(self, core: "EngineCore", inbox: "zmq.Socket[bytes]", outboxes: Outboxes, progress: Progress) -> None:
        self._core = core
        self._inbox = inbox
        self._outboxes = outboxes
        self._progress = progress
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._open: dict[int, set[int]] = {}
        """Request -> candidates that have not ended."""
        self._more_when_idle = True
        """Whether the core has something to do while there is no work."""
        self._checked = True
        """Whether the idle check has run since the last request."""

    def run(self) -> None:
        """Until the client says to shut down. Raises what a step raises: then every request is lost."""
        while True:
            if not self._core.has_work and not self._checked:
                self._check_idle()
            if not self._receive(wait=not self._core.has_work and not self._more_when_idle):
                return
            if self._core.has_work:
                self._more_when_idle = True
                self._step()
            elif self._more_when_idle:
                self._progress.step_began = time.monotonic()
                self._more_when_idle = self._core.idle()
                self._progress.step_began = None

    def _step(self) -> None:
        self._progress.step_began = time.monotonic()
        outputs = self._core.step()
        self._progress.step_began = None
        self._progress.stats = stats = self._core.stats
        parts = {0: Outputs(stats)}
        for output in outputs:
            client = output.request >> CLIENT_SHIFT
            if client not in parts:
                parts[client] = Outputs(stats)
            parts[client].add(output)
            if output.finish is not None:
                self._close(output.request, output.candidate)
        for client, part in parts.items():
            self._outboxes.send(client, part)

    def _close(self, request: int, candidate: int) -> None:
        candidates = self._open.get(request, set())
        candidates.discard(candidate)
        if not candidates:
            self._open.pop(request, None)

    def _check_idle(self) -> None:
        self._checked = True
        try:
            self._core.check_idle()
        except AssertionError:
            self._progress.leaks += 1
            log.exception("the engine is idle, yet something is still held; please report this")
        # After an abort no step comes that would tell.
        self._progress.stats = self._core.stats
        self._outboxes.send_all(lambda: Outputs(self._progress.stats))

    def _receive(self, *, wait: bool) -> bool:
        """Takes every message that is there. False: shut down."""
        flags = 0 if wait else zmq.NOBLOCK
        while True:
            try:
                frame = self._inbox.recv(flags)
            except zmq.Again:
                return True
            flags = zmq.NOBLOCK
            try:
                message = self._decoder.decode(frame)
            except msgspec.MsgspecError as error:
                log.error("a message of %d bytes that makes no sense was dropped: %s", len(frame), error)
                continue
            match message:
                case Add(request):
                    self._add(request)
                case Abort(request_id, candidate):
                    self._abort(request_id, candidate)
                case Join(client):
                    self._outboxes.join(client)
                    self._outboxes.send(client, Ready(self._core.limits, self._core.stats))
                case Leave(client):
                    self._drop(client)
                case Shutdown():
                    return False

    def _add(self, request: Request) -> None:
        if request.id >> CLIENT_SHIFT not in self._outboxes:
            return  # The news that the client is gone overtook its last request.
        self._checked = False
        self._open[request.id] = set(range(request.params.n))
        self._core.add(request)

    def _abort(self, request: int, candidate: int | None) -> None:
        self._core.abort(request, candidate)
        if candidate is None:
            self._open.pop(request, None)
        else:
            self._close(request, candidate)

    def _drop(self, client: int) -> None:
        if client in self._outboxes:
            self._outboxes.leave(client)
        for request in [request for request in self._open if request >> CLIENT_SHIFT == client]:
            self._abort(request, None)


class Heartbeat(threading.Thread):
    """Tells the clients that the process lives and how its step is doing; ends the process when client 0 is gone."""

    def __init__(self, outboxes: Outboxes, launch: Launch, progress: Progress) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._outboxes = outboxes
        self._launch = launch
        self._progress = progress
        self._stop_event = threading.Event()

    def run(self) -> None:
        while not self._stop_event.wait(self._launch.heartbeat_s):
            if os.getppid() != self._launch.parent:
                shutil.rmtree(self._launch.folder, ignore_errors=True)
                os._exit(1)
            self._outboxes.send_all(self._beat)

    def _beat(self) -> Beat:
        began = self._progress.step_began
        age = 0.0 if began is None else time.monotonic() - began
        return Beat(age, self._progress.leaks, self._progress.stats)

    def stop(self) -> None:
        self._stop_event.set()
        self.join()


def main(argument: str) -> int:
    """Runs an engine as `Launch` (JSON) describes it; returns the exit status."""
    # Ctrl-C and a service manager's SIGTERM reach the whole group; the client decides what they mean, and drains.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    launch = msgspec.json.decode(argument, type=Launch)
    logging.basicConfig(level=launch.log_level, format="%(asctime)s %(levelname)s engine: %(message)s")
    context = zmq.Context()
    inbox = context.socket(zmq.PULL)
    inbox.rcvhwm = 0
    inbox.bind(engine_address(launch.folder))
    outboxes = Outboxes(context, launch)
    progress = Progress()
    heartbeat = Heartbeat(outboxes, launch, progress)
    heartbeat.start()
    failure: Failed | None = None
    try:
        module, _, function = launch.core.partition(":")
        build = getattr(importlib.import_module(module), function)
        core: EngineCore = build(launch.config, lambda stage, share: outboxes.send(0, Loading(stage, share)))
        calm_collector()
        progress.stats = core.stats
        outboxes.send(0, Ready(core.limits, core.stats))
        EngineLoop(core, inbox, outboxes, progress).run()
        core.close()
    except (CheckpointError, InvalidConfig) as error:
        failure = Failed(str(error), "")
    except Exception as error:
        failure = Failed(f"{type(error).__name__}: {error}", traceback.format_exc())
    if failure is not None:
        outboxes.send_all(lambda: failure)
    heartbeat.stop()
    context.destroy(linger=LINGER_MS)
    return int(failure is not None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
