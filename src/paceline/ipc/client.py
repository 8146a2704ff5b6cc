"""The client's end of the link: starts the engine process, feeds it, hands its outputs out, and watches its health."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from paceline.engine.config import EngineConfig
from paceline.engine.invalid import InvalidRequest
from paceline.engine.limits import Limits
from paceline.engine.output import OutputProcessor
from paceline.engine.request import CoreOutput, CoreStats, Finish, Request
from paceline.ipc.errors import EngineDead, EngineStuck
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
from paceline.ipc.stream import Channel, RequestStream

log = logging.getLogger(__name__)

CLOSE_S = 5.0
"""Longest wait for the engine process to exit by itself."""
LAST_WORDS_S = 0.5
"""Longest wait for the reason of an engine that has just exited."""


class EngineClient:
    """One engine process. Use it from one event loop.

    Args:
        config: what the engine loads.
        core: ``module:function`` that builds the core in the engine process.
        heartbeat_timeout: seconds without a sign of life after which a ready engine counts as stuck.
        step_timeout: seconds that one step may last; also the longest silence during start-up.
        on_progress: called with (stage, share) during start-up.

    Attributes:
        limits: set once started.
        stats: state of the core after its latest step.
        error: why the engine is dead or stuck; None: healthy. A stuck engine may recover.
        leaks: idle checks that failed in the engine.
    """

    limits: Limits

    def __init__(
        self,
        config: EngineConfig,
        *,
        core: str = "paceline.core:build_core",
        heartbeat_timeout: float = 5.0,
        step_timeout: float = 120.0,
        on_progress: Callable[[str, float], None] | None = None,
    ) -> None:
        self._config = config
        self._core = core
        self._heartbeat_timeout = heartbeat_timeout
        self._step_timeout = step_timeout
        self._on_progress = on_progress
        self.stats = CoreStats()
        self.error: str | None = None
        self.leaks = 0
        self._channels: dict[int, Channel] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self._process: Process | None = None
        self._dead = asyncio.Event()
        self._begun = False
        self._serving = False
        self._closing = False
        self._tasks: list[asyncio.Task[None]] = []
        self._resources = contextlib.ExitStack()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToClient)
        self._add_decoder = msgspec.msgpack.Decoder(Add)
        self._last_sign = 0.0
        self._step_age = 0.0

    @property
    def open_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._channels)

    @property
    def pid(self) -> int | None:
        """Process id of the engine."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Starts the process and waits until it is ready. Raises EngineDead with the engine's reason if it fails, and
        RuntimeError when it was started or closed before."""
        if self._begun or self._closing:
            raise RuntimeError("this client has been started or closed already")
        self._begun = True
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        # Unix sockets have short names; a long TMPDIR would not fit.
        root = None if len(tempfile.gettempdir()) < 60 else "/tmp"
        self._folder = self._resources.enter_context(tempfile.TemporaryDirectory(prefix="paceline-", dir=root))
        launch = Launch(
            folder=self._folder,
            parent=os.getpid(),
            core=self._core,
            config=self._config,
            heartbeat_s=min(1.0, self._heartbeat_timeout / 5),
            log_level=logging.getLogger("paceline").getEffectiveLevel(),
        )
        # Whoever receives binds: a stranger who connects can at most send, never take a message away.
        context = zmq.Context()
        self._resources.callback(context.destroy, linger=0)
        inbox = context.socket(zmq.PULL)
        inbox.rcvhwm = 0
        inbox.bind(launch.to_client)
        self._inbox = zmq.asyncio.Socket.from_socket(inbox)
        # Closed by itself, or the event loop goes on watching its file descriptor, which the next socket gets.
        self._resources.callback(self._inbox.close, linger=0)
        self._outbox = context.socket(zmq.PUSH)
        self._outbox.sndhwm = 0
        self._outbox.linger = 0  # Nothing waits for an engine that is gone, not even an exit without `close`.
        self._outbox.connect(launch.to_engine)
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "paceline.ipc.process",
                msgspec.json.encode(launch).decode(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            )
            self._last_sign = time.monotonic()
            for work in (self._read(), self._watch(), self._wait_for_exit()):
                self._spawn(work)
            ready = await self._ready
        except BaseException:
            await self.close()
            raise
        self.limits = ready.limits
        self.stats = ready.stats
        self._serving = True

    def submit(self, request: Request, processor: OutputProcessor) -> RequestStream:
        """Sends a request that has passed `Limits.check`. ``request.id`` must be new.

        Raises:
            EngineDead: the engine cannot serve.
            InvalidRequest: it holds what no message can carry (a lone surrogate, a number beyond 64 bits), or a value
                of the wrong type.
        """
        if self._closing:
            raise EngineDead("the engine is being closed")
        if self.error is not None:
            raise self._failure()
        try:
            frame = self._encoder.encode(Add(request))
            # The engine would drop what it cannot read, and nobody would ever answer.
            self._add_decoder.decode(frame)
        except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
            raise InvalidRequest("request", f"cannot be sent to the engine: {error}") from error
        channel = Channel(processor, request.params.n)
        stream = RequestStream(request.id, channel, self.abort)
        self._channels[request.id] = channel
        self._empty.clear()
        self._outbox.send(frame, zmq.NOBLOCK)
        return stream

    def abort(self, request_id: int) -> None:
        """Ends a request here and in the engine; does nothing when it has ended."""
        channel = self._channels.get(request_id)
        if channel is None:
            return
        for candidate in range(channel.candidates):
            delta = channel.processor.push(CoreOutput(request=request_id, candidate=candidate, finish=Finish.ABORT))
            if delta is not None:
                channel.put(delta)
        self._end(request_id)
        self._tell(Abort(request_id))

    async def close(self, *, drain_s: float = 0.0) -> None:
        """Waits up to ``drain_s`` seconds for open requests, aborts the rest and ends the process in bounded time."""
        self._closing = True
        if drain_s > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), drain_s)
        for request_id in list(self._channels):
            self.abort(request_id)
        if self._process is not None and self._process.returncode is None:
            if self._serving:
                self._tell(Shutdown())
            else:
                self._process.kill()  # It reads no messages while it loads, and there is nothing to lose.
            try:
                await asyncio.wait_for(self._process.wait(), CLOSE_S)
            except TimeoutError:
                log.warning("the engine did not exit within %g s and is killed", CLOSE_S)
                self._process.kill()
                await self._process.wait()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._resources.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(self._task_done)
        self._tasks.append(task)

    def _task_done(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the link to the engine failed", exc_info=error)
            self._die(f"the link to the engine failed: {error!r}")

    def _tell(self, message: ToEngine) -> None:
        self._outbox.send(self._encoder.encode(message), zmq.NOBLOCK)

    async def _read(self) -> None:
        while True:
            frame = await self._inbox.recv()
            try:
                message = self._decoder.decode(frame)
            except msgspec.MsgspecError as error:
                log.error("a message of %d bytes that makes no sense was dropped: %s", len(frame), error)
                continue
            self._last_sign = time.monotonic()
            match message:
                case Outputs(outputs, stats):
                    self.stats = stats
                    for output in outputs:
                        self._dispatch(output)
                    await asyncio.sleep(0)  # A pile of messages must not keep the consumers waiting.
                case Beat(_, step_age, leaks):
                    self._step_age = step_age
                    self.leaks = leaks
                case Loading(stage, share):
                    if self._on_progress is not None:
                        self._on_progress(stage, share)
                case Ready():
                    if not self._ready.done():
                        self._ready.set_result(message)
                case Failed(reason, traceback):
                    if traceback:
                        log.error("the engine failed:\n%s", traceback)
                    self._die(reason)

    def _dispatch(self, output: CoreOutput) -> None:
        channel = self._channels.get(output.request)
        if channel is None:
            return  # It was aborted here; the engine did not know yet.
        try:
            delta = channel.processor.push(output)
        except Exception as error:
            log.exception("a request failed while its output was turned into text")
            self._end(output.request, error)
            self._tell(Abort(output.request))
            return
        if delta is None:
            return
        channel.put(delta)
        if channel.processor.finished:
            self._end(output.request)
        if delta.finish is not None and output.finish is None:
            self._tell(Abort(output.request, output.candidate))  # A stop string that only the text shows.

    def _end(self, request_id: int, error: Exception | None = None) -> None:
        self._channels.pop(request_id).end(error)
        if not self._channels:
            self._empty.set()

    def _fail_all(self) -> None:
        for request_id in list(self._channels):
            self._end(request_id, self._failure())

    def _failure(self) -> EngineDead:
        assert self.error is not None
        return (EngineDead if self._dead.is_set() else EngineStuck)(self.error)

    def _die(self, reason: str) -> None:
        """The first reason counts."""
        if self._dead.is_set():
            return
        self._dead.set()
        self.error = reason
        if not self._ready.done():
            self._ready.set_exception(EngineDead(reason))
        self._fail_all()

    async def _wait_for_exit(self) -> None:
        assert self._process is not None
        status = await self._process.wait()
        if status > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._dead.wait(), LAST_WORDS_S)
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        self._die(f"the engine process {how}")

    async def _watch(self) -> None:
        period = self._heartbeat_timeout / 10
        while not self._dead.is_set():
            asleep = time.monotonic()
            await asyncio.sleep(period)
            now = time.monotonic()
            # While this process stood still nobody read the engine's signs of life.
            self._last_sign += max(0.0, now - asleep - period)
            silence = now - self._last_sign
            if not self._ready.done():
                if silence > self._step_timeout:
                    self._die(f"the engine gave no sign of life for {silence:.0f} s while it started")
            elif silence > self._heartbeat_timeout:
                self._stick(f"no sign of life from the engine for {silence:.1f} s")
            elif self._step_age > self._step_timeout:
                self._stick(f"a step of the engine has lasted {self._step_age:.0f} s")
            elif self.error is not None and not self._dead.is_set():
                log.warning("the engine is back")
                self.error = None

    def _stick(self, reason: str) -> None:
        if self._dead.is_set():
            return
        if self.error is None:
            log.error("%s; open requests fail", reason)
        self.error = reason
        for request_id in self._channels:
            self._tell(Abort(request_id))
        self._fail_all()
