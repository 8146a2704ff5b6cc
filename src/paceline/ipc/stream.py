"""The deltas of one request, from the client's reader to whoever asked for them."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Protocol, Self

from paceline.engine.output import Delta
from paceline.engine.step import TokenLogprobs


def merged(first: Delta, then: Delta) -> Delta:
    """Two deltas of one candidate as one."""
    return replace(
        then,
        text=first.text + then.text,
        ids=[*first.ids, *then.ids],
        logprobs=_joined(first.logprobs, then.logprobs),
        prompt_logprobs=then.prompt_logprobs if first.prompt_logprobs is None else first.prompt_logprobs,
        cached_tokens=max(first.cached_tokens, then.cached_tokens),
        queued_s=max(first.queued_s, then.queued_s),
    )


def _joined(first: list[TokenLogprobs] | None, then: list[TokenLogprobs] | None) -> list[TokenLogprobs] | None:
    return None if first is None and then is None else [*(first or ()), *(then or ())]


class Receiver(Protocol):
    """Where the deltas of one request go. Called from the event loop, between whose turns nothing waits."""

    def put(self, delta: Delta) -> None:
        """The next delta. An exception ends the request."""

    def end(self, error: Exception | None = None) -> None:
        """Nothing more comes; ``error`` says why if it is not the end of every candidate."""


class Channel:
    """A `Receiver` for one consumer that takes deltas when it likes. Those that it has not taken are at most one a
    candidate, so a slow consumer piles up no objects."""

    def __init__(self) -> None:
        self.ended = False
        """Nothing will be put any more."""
        self._error: Exception | None = None
        self._pending: dict[int, Delta] = {}
        self._wake = asyncio.Event()

    def put(self, delta: Delta) -> None:
        earlier = self._pending.get(delta.candidate)
        self._pending[delta.candidate] = delta if earlier is None else merged(earlier, delta)
        self._wake.set()

    def end(self, error: Exception | None = None) -> None:
        """After what is pending the consumer gets ``error``, or the end."""
        self.ended = True
        self._error = error
        self._wake.set()

    async def get(self) -> Delta:
        """The next delta. Raises the error that ended the channel, or StopAsyncIteration."""
        while not self._pending:
            if self._error is not None:
                raise self._error
            if self.ended:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._pending.pop(next(iter(self._pending)))


class RequestStream:
    """Async iterator of a request's deltas, for one consumer.

    Deltas of one candidate that nobody has taken yet come as one. Leaving before the end aborts the request: by
    `abort`, at the end of ``async with``, or by dropping the stream. After an abort, each candidate that was still
    open brings one more delta, with ``Finish.ABORT``.

    Raises:
        EngineDead: from the iteration, after what had arrived, when the engine ended or is stuck.
    """

    def __init__(self, request_id: int, channel: Channel, abort: Callable[[int], None]) -> None:
        self.request_id = request_id
        self._channel = channel
        self._abort = abort
        self._loop = asyncio.get_running_loop()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        return await self._channel.get()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort()

    def abort(self) -> None:
        """Ends the request in the engine; does nothing when it has ended."""
        self._abort(self.request_id)

    def __del__(self) -> None:
        # The garbage collector may call this from any thread.
        if not self._channel.ended and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._abort, self.request_id)
