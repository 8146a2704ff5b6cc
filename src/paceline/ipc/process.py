"""The engine process: runs the core's loop and answers the client. Started by `paceline.ipc.client`."""

import faulthandler
import gc
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
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import zmq

from paceline.checkpoint.error import CheckpointError
from paceline.engine.config import InvalidConfig
from paceline.ipc.messages import (
    Abort,
    Add,
    Beat,
    Failed,
    Launch,
    Loading,
    Outputs,
    Ready,
    Shutdown,
    ToClient,
    ToEngine,
)

if TYPE_CHECKING:
    from paceline.core import EngineCore

log = logging.getLogger("paceline.ipc.process")

LINGER_MS = 2000
"""Longest wait at exit for the client to take the last messages."""


@dataclass(slots=True)
class Progress:
    """What the loop is doing; the loop writes it, the heartbeat reads it."""

    steps: int = 0
    step_began: float | None = None
    leaks: int = 0


class EngineLoop:
    """Messages in, one step, one message out; waits for messages when there is nothing to do."""

    def __init__(
        self, core: "EngineCore", inbox: "zmq.Socket[bytes]", send: Callable[[ToClient], None], progress: Progress
    ) -> None:
        self._core = core
        self._inbox = inbox
        self._send = send
        self._progress = progress
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._checked = True
        """Whether the idle check has run since the last request."""

    def run(self) -> None:
        """Until the client says to shut down. Raises what a step raises: then every request is lost."""
        while True:
            if not self._core.has_work and not self._checked:
                self._check_idle()
            if not self._receive(wait=not self._core.has_work):
                return
            if self._core.has_work:
                self._step()

    def _step(self) -> None:
        self._progress.step_began = time.monotonic()
        outputs = self._core.step()
        self._progress.step_began = None
        self._progress.steps += 1
        self._send(Outputs(outputs, self._core.stats))

    def _check_idle(self) -> None:
        self._checked = True
        try:
            self._core.check_idle()
        except AssertionError:
            self._progress.leaks += 1
            log.exception("the engine is idle, yet something is still held; please report this")
        # After an abort no step comes that would tell.
        self._send(Outputs([], self._core.stats))

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
                    self._checked = False
                    self._core.add(request)
                case Abort(request_id, candidate):
                    self._core.abort(request_id, candidate)
                case Shutdown():
                    return False


class Heartbeat(threading.Thread):
    """Tells the client that the process lives and how its step is doing; ends the process when the client is gone."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", launch: Launch, progress: Progress) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._context = context
        self._launch = launch
        self._progress = progress
        self._stop_event = threading.Event()

    def run(self) -> None:
        socket = self._context.socket(zmq.PUSH)
        socket.sndhwm = 0
        socket.connect(self._launch.to_client)
        while not self._stop_event.wait(self._launch.heartbeat_s):
            if os.getppid() != self._launch.parent:
                shutil.rmtree(self._launch.folder, ignore_errors=True)
                os._exit(1)
            began = self._progress.step_began
            age = 0.0 if began is None else time.monotonic() - began
            socket.send(msgspec.msgpack.encode(Beat(self._progress.steps, age, self._progress.leaks)))
        socket.close(linger=0)

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
    inbox.bind(launch.to_engine)
    outbox = context.socket(zmq.PUSH)
    outbox.sndhwm = 0
    outbox.connect(launch.to_client)
    encoder = msgspec.msgpack.Encoder()

    def send(message: ToClient) -> None:
        outbox.send(encoder.encode(message))

    progress = Progress()
    heartbeat = Heartbeat(context, launch, progress)
    heartbeat.start()
    status = 0
    try:
        module, _, function = launch.core.partition(":")
        build = getattr(importlib.import_module(module), function)
        core: EngineCore = build(launch.config, lambda stage, share: send(Loading(stage, share)))
        gc.collect()
        gc.freeze()
        send(Ready(core.limits, core.stats))
        EngineLoop(core, inbox, send, progress).run()
        core.close()
    except (CheckpointError, InvalidConfig) as error:
        send(Failed(str(error), ""))
        status = 1
    except Exception as error:
        send(Failed(f"{type(error).__name__}: {error}", traceback.format_exc()))
        status = 1
    heartbeat.stop()
    context.destroy(linger=LINGER_MS)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
