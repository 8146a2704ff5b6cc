"""When to stop: first gracefully, then at once."""

import asyncio
import signal
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Self


class Stop:
    """What asks a process to stop, as futures. Use it from one event loop.

    Attributes:
        first: done when the process shall end what is open and stop.
        second: done when it shall not wait for that.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.first: asyncio.Future[None] = loop.create_future()
        self.second: asyncio.Future[None] = loop.create_future()

    def ask(self) -> None:
        """Once more."""
        future = self.second if self.first.done() else self.first
        if not future.done():
            future.set_result(None)

    async def interrupts(self, work: Coroutine[Any, Any, None]) -> bool:
        """Runs ``work`` to its end, or cancels it when asked to stop; whether it was cancelled."""
        task = asyncio.create_task(work)
        await asyncio.wait({task, self.first}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
            return False
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        return True


class StopBySignal(Stop):
    """Each SIGTERM or SIGINT asks."""

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self.ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)
