"""The sequences of one HTTP request: handed to the engine, merged as their deltas come, ended in one place."""

import asyncio
from collections.abc import Callable

from paceline.engine.output import Delta
from paceline.engine.sampling_params import SamplingParams
from paceline.ipc.errors import EngineDead
from paceline.ipc.stream import Receiver, merged
from paceline.server.admission import Ticket
from paceline.server.errors import Disconnected, failed, unavailable
from paceline.server.metrics import RequestMeter

Send = Callable[[list[int], SamplingParams, Receiver], int]


class Generation:
    """Deltas of all prompts of a request, as they come. Those that nobody has taken yet are at most one a sequence.

    Args:
        prompts: checked token ids.
        params: of every prompt.
        send: hands one prompt to the engine; returns its id.
        abort: ends one in the engine, by its id.
        ticket: closed with the generation, its places given back as prompts start.
        meter: sees every delta.
        on_close: called once, at the end.

    Raises:
        ApiError: 503 when the engine cannot take it. Nothing is left behind then.
    """

    def __init__(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        send: Send,
        abort: Callable[[int], None],
        ticket: Ticket,
        meter: RequestMeter,
        on_close: Callable[["Generation"], None],
    ) -> None:
        self._abort = abort
        self._ticket = ticket
        self._meter = meter
        self._on_close = on_close
        self._ready: dict[tuple[int, int], Delta] = {}
        self._failure: Exception | None = None
        self._closed = False
        self._reader: asyncio.Future[None] | None = None
        self._running: dict[int, int] = {}
        """Prompt -> id of its request in the engine."""
        try:
            for prompt, ids in enumerate(prompts):
                self._running[prompt] = send(ids, params, _PromptReceiver(self, prompt, params.n))
        except BaseException as error:
            self.close()
            if isinstance(error, EngineDead):
                raise unavailable(f"the engine cannot serve: {error}", "engine_unavailable") from error
            raise

    async def deltas(self) -> list[tuple[int, Delta]]:
        """Waits for deltas and returns all that are ready, each with the number of its prompt; none: all is said.

        Raises:
            ApiError: the engine failed, or the server is going down.
            Disconnected: see `leave`.
        """
        while not self._ready:
            if self._failure is not None:
                raise self._failure
            if not self._running:
                return []
            # A bare future: an event would cost several times as much, for every token.
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        ready = [(prompt, delta) for (prompt, _), delta in self._ready.items()]
        self._ready.clear()
        return ready

    @property
    def ended(self) -> bool:
        """Whether `deltas` has nothing more to say, good or bad."""
        return not self._ready and not self._running and self._failure is None

    def leave(self) -> None:
        """The client went away: abort at once."""
        self.fail(Disconnected())

    def fail(self, error: Exception) -> None:
        """Aborts what runs; the reader gets ``error`` after what is ready."""
        if self._running and self._failure is None:
            self._failure = error
            for request in list(self._running.values()):
                self._abort(request)
            self._wake()

    def close(self) -> None:
        """Gives everything back, aborting what still runs. May be called again."""
        if self._closed:
            return
        self._closed = True
        self.leave()
        self._ticket.close()
        self._meter.close("abort" if self._failure is None or isinstance(self._failure, Disconnected) else "error")
        self._on_close(self)

    def put(self, prompt: int, delta: Delta, starts: bool) -> None:
        if self._failure is not None:
            return  # Nobody reads on, and `close` counts what did not end by itself.
        if starts:
            self._ticket.started(1)
        self._meter.delta(prompt, delta)
        if delta.error:
            self._failure = failed(delta.error)
        else:
            key = prompt, delta.candidate
            earlier = self._ready.get(key)
            self._ready[key] = delta if earlier is None else merged(earlier, delta)
        self._wake()

    def end(self, prompt: int, error: Exception | None, not_started: int) -> None:
        self._running.pop(prompt, None)
        self._ticket.started(not_started)
        if error is not None and self._failure is None:
            if isinstance(error, EngineDead):
                self._failure = unavailable(f"the engine failed: {error}", "engine_unavailable")
            else:
                self._failure = failed(f"the output of this request failed: {type(error).__name__}")
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class _PromptReceiver:
    """Where the deltas of one prompt arrive."""

    __slots__ = ("_generation", "_prompt", "_waiting")

    def __init__(self, generation: Generation, prompt: int, n: int) -> None:
        self._generation = generation
        self._prompt = prompt
        self._waiting = set(range(n))

    def put(self, delta: Delta) -> None:
        starts = delta.candidate in self._waiting and (bool(delta.ids) or delta.finish is not None)
        if starts:
            self._waiting.discard(delta.candidate)
        self._generation.put(self._prompt, delta, starts)

    def end(self, error: Exception | None = None) -> None:
        self._generation.end(self._prompt, error, len(self._waiting))
