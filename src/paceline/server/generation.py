"""The sequences of one HTTP request: handed to the engine, merged as their deltas come, ended in one place."""

import asyncio
import logging
from collections.abc import Callable

from paceline.engine.output import Delta
from paceline.engine.sampling_params import SamplingParams
from paceline.ipc.errors import EngineDead
from paceline.ipc.stream import RequestStream
from paceline.server.admission import Ticket
from paceline.server.errors import ApiError, Disconnected, failed, unavailable
from paceline.server.metrics import RequestMeter

log = logging.getLogger(__name__)

Submit = Callable[[list[int], SamplingParams], RequestStream]


class Generation:
    """Deltas of all prompts of a request, as they come.

    Args:
        prompts: checked token ids.
        params: of every prompt.
        submit: hands one prompt to the engine.
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
        submit: Submit,
        ticket: Ticket,
        meter: RequestMeter,
        on_close: Callable[["Generation"], None],
    ) -> None:
        self.params = params
        self._ticket = ticket
        self._meter = meter
        self._on_close = on_close
        self._ready: list[tuple[int, Delta]] = []
        self._failure: Exception | None = None
        self._closed = False
        self._wake = asyncio.Event()
        self._streams: list[RequestStream] = []
        self._running = 0
        try:
            for ids in prompts:
                self._streams.append(submit(ids, params))
                self._running += 1
        except BaseException as error:
            self.close()
            if isinstance(error, EngineDead):
                raise unavailable(f"the engine cannot serve: {error}", "engine_unavailable") from error
            raise
        self._pumps = [asyncio.create_task(self._pump(i, stream)) for i, stream in enumerate(self._streams)]

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
            self._wake.clear()
            await self._wake.wait()
        ready, self._ready = self._ready, []
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
            for stream in self._streams:
                stream.abort()
            self._wake.set()

    def close(self) -> None:
        """Gives everything back, aborting what still runs. May be called again."""
        if self._closed:
            return
        self._closed = True
        self.leave()
        self._ticket.close()
        self._meter.close("abort" if self._failure is None or isinstance(self._failure, Disconnected) else "error")
        self._on_close(self)

    async def _pump(self, prompt: int, stream: RequestStream) -> None:
        started: set[int] = set()
        try:
            async for delta in stream:
                if self._failure is not None:
                    continue  # Nobody reads on, and `close` counts what did not end by itself.
                if delta.candidate not in started and (delta.ids or delta.finish is not None):
                    started.add(delta.candidate)
                    self._ticket.started(1)
                self._meter.delta(prompt, delta)
                if delta.error:
                    self._failure = failed(delta.error)
                else:
                    self._ready.append((prompt, delta))
                self._wake.set()
        except EngineDead as error:
            self._fail_with(unavailable(f"the engine failed: {error}", "engine_unavailable"))
        except Exception as error:
            log.exception("the output of a request failed")
            self._fail_with(failed(f"the output of this request failed: {type(error).__name__}"))
        finally:
            self._ticket.started(self.params.n - len(started))
            self._running -= 1
            self._wake.set()

    def _fail_with(self, error: ApiError) -> None:
        if self._failure is None:
            self._failure = error
