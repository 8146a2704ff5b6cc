"""A client's end of the link to the engine process: feeds it, hands its outputs out, and watches its health."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
import zmq.asyncio

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
    Loading,
    Outputs,
    Ready,
    ToClient,
    ToEngine,
    client_address,
    engine_address,
)
from paceline.ipc.stream import Receiver

log = logging.getLogger(__name__)

READ_AHEAD = 16
"""Most messages that are read before those who wait for them run. More than one is there only when this process falls
behind; then the tokens of several steps come as one delta, which costs less than one each."""


@dataclass(slots=True)
class Open:
    """A request that has not ended."""

    processor: OutputProcessor
    receiver: Receiver
    candidates: int


class EngineLink:
    """A link to an engine process that another client started. Use it from one event loop.

    Args:
        number: of this client, not used before with this engine.
        heartbeat_timeout: seconds without a sign of life after which the engine counts as stuck.
        step_timeout: seconds that one step may last; also the longest silence during start-up.

    Attributes:
        limits: set once connected.
        stats: state of the core after its latest step, at most a second late.
        error: why the engine is dead or stuck; None: healthy. A stuck engine may recover.
        leaks: idle checks that failed in the engine.
    """

    limits: Limits

    def __init__(self, number: int, *, heartbeat_timeout: float = 5.0, step_timeout: float = 120.0) -> None:
        self.number = number
        self._heartbeat_timeout = heartbeat_timeout
        self._step_timeout = step_timeout
        self.stats = CoreStats()
        self.error: str | None = None
        self.leaks = 0
        self._open: dict[int, Open] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self._dead = asyncio.Event()
        self._closing = False
        self._connected = False
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
        return len(self._open)

    async def join(self, folder: str) -> None:
        """Connects to the engine of ``folder``, whose client 0 has admitted this one. Waits until it is ready, however
        long that takes. Raises EngineDead if it fails."""
        self._connect(folder)
        try:
            self._spawn(self._read())
            self._take_over(await self._ready)
            self._spawn(self._watch())
        except BaseException:
            await self.close()
            raise

    def send(self, request: Request, processor: OutputProcessor, receiver: Receiver) -> None:
        """Sends a request that has passed `Limits.check`; ``receiver`` gets its deltas. ``request.id`` must be new and
        carry this client's number.

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
        self._open[request.id] = Open(processor, receiver, request.params.n)
        self._empty.clear()
        self._outbox.send(frame, zmq.NOBLOCK)

    def abort(self, request_id: int) -> None:
        """Ends a request here and in the engine; does nothing when it has ended."""
        request = self._open.get(request_id)
        if request is None:
            return
        for candidate in range(request.candidates):
            delta = request.processor.push(CoreOutput(request=request_id, candidate=candidate, finish=Finish.ABORT))
            if delta is not None:
                request.receiver.put(delta)
        self._end(request_id)
        self._tell(Abort(request_id))

    async def close(self, *, drain_s: float = 0.0) -> None:
        """Waits up to ``drain_s`` seconds for open requests, aborts the rest and closes the link."""
        self._closing = True
        if drain_s > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), drain_s)
        for request_id in list(self._open):
            self.abort(request_id)
        await self._close_engine()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._connected = False
        self._resources.close()

    async def _close_engine(self) -> None:
        """Ends what this client has started besides the link."""

    def _connect(self, folder: str) -> None:
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        # Whoever receives binds: a stranger who connects can at most send, never take a message away.
        context = zmq.Context()
        self._resources.callback(context.destroy, linger=0)
        self._inbox = context.socket(zmq.PULL)
        self._inbox.rcvhwm = 0
        self._inbox.bind(client_address(folder, self.number))
        self._async_inbox = zmq.asyncio.Socket.from_socket(self._inbox)
        # Closed by itself, or the event loop goes on watching its file descriptor, which the next socket gets.
        self._resources.callback(self._async_inbox.close, linger=0)
        self._outbox = context.socket(zmq.PUSH)
        self._outbox.sndhwm = 0
        self._outbox.linger = 0  # Nothing waits for an engine that is gone, not even an exit without `close`.
        self._outbox.connect(engine_address(folder))
        self._last_sign = time.monotonic()
        self._connected = True

    def _take_over(self, ready: Ready) -> None:
        self.limits = ready.limits
        self.stats = ready.stats

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(self._task_done)
        self._tasks.append(task)

    def _task_done(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the link to the engine failed", exc_info=error)
            self._die(f"the link to the engine failed: {error!r}")

    def _tell(self, message: ToEngine) -> None:
        if not self._connected:  # A process that starts or ends while the link closes has nobody left to tell.
            return
        self._outbox.send(self._encoder.encode(message), zmq.NOBLOCK)

    async def _read(self) -> None:
        while True:
            self._take(await self._async_inbox.recv())
            with contextlib.suppress(zmq.Again):
                for _ in range(READ_AHEAD - 1):
                    self._take(self._inbox.recv(zmq.NOBLOCK))
            await asyncio.sleep(0)  # A pile of messages must not keep the consumers waiting.

    def _take(self, frame: bytes) -> None:
        try:
            message = self._decoder.decode(frame)
        except msgspec.MsgspecError as error:
            log.error("a message of %d bytes that makes no sense was dropped: %s", len(frame), error)
            return
        self._last_sign = time.monotonic()
        match message:
            case Outputs():
                self.stats = message.stats
                for output in message:
                    self._dispatch(output)
            case Beat(step_age, leaks, stats):
                self._step_age = step_age
                self.leaks = leaks
                self.stats = stats
            case Loading(stage, share):
                self._loading(stage, share)
            case Ready():
                if not self._ready.done():
                    self._ready.set_result(message)
            case Failed(reason, traceback):
                if traceback:
                    log.error("the engine failed:\n%s", traceback)
                self._die(reason)

    def _loading(self, stage: str, share: float) -> None:
        """How far the engine's start is."""

    def _dispatch(self, output: CoreOutput) -> None:
        request = self._open.get(output.request)
        if request is None:
            return  # It was aborted here; the engine did not know yet.
        try:
            delta = request.processor.push(output)
            if delta is None:
                return
            request.receiver.put(delta)
        except Exception as error:
            log.exception("a request failed while its output was turned into text")
            self._end(output.request, error)
            self._tell(Abort(output.request))
            return
        if delta.finish is not None:
            if request.processor.finished:
                self._end(output.request)
            if output.finish is None:
                self._tell(Abort(output.request, output.candidate))  # A stop string that only the text shows.

    def _end(self, request_id: int, error: Exception | None = None) -> None:
        self._open.pop(request_id).receiver.end(error)
        if not self._open:
            self._empty.set()

    def _fail_all(self) -> None:
        for request_id in list(self._open):
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
        for request_id in self._open:
            self._tell(Abort(request_id))
        self._fail_all()
