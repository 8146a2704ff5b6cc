"""Sending a reply, whole or as server-sent events, while watching whether the client is still there."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from fastapi import Response
from starlette.types import Receive, Scope, Send

from paceline.engine.output import RequestOutput
from paceline.server.errors import ApiError, Disconnected, failed, json_response
from paceline.server.generation import Generation
from paceline.server.reply import Reply, event

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
PLAIN_SEND = "paceline.send"
"""Where the outermost middleware leaves the server's own ``send``."""


async def whole_reply(generation: Generation, reply: Reply, receive: Receive) -> Response:
    """Waits for the end of every sequence.

    Raises:
        ApiError: the engine failed; none of what was generated is returned.
        Disconnected: the client went away.
    """
    outputs = [RequestOutput(prompt.ids, reply.params.n) for prompt in reply.prompts]
    try:
        async with _watched(generation, receive):
            while deltas := await generation.deltas():
                for prompt, delta in deltas:
                    outputs[prompt].add(delta)
    finally:
        generation.close()
    return json_response(reply.whole(outputs))


class EventStream(Response):
    """A reply as server-sent events. All deltas that are ready go out in one write."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, reply: Reply) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._generation = generation
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with _watched(self._generation, receive):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                # Middlewares have something to say about the start only, and their detours cost time for every token.
                send = scope[PLAIN_SEND]
                more = True
                while more:
                    events, more = await self._next()
                    if not more:
                        self._generation.close()  # First, so that a client that has read the end finds its place free.
                    if events or not more:
                        await send({"type": "http.response.body", "body": events, "more_body": more})
        except Disconnected:
            pass
        finally:
            self._generation.close()

    async def _next(self) -> tuple[bytes, bool]:
        """The events that are ready, and whether more will come."""
        reply = self._reply
        try:
            deltas = await self._generation.deltas()
            events = b"".join([reply.events(prompt, delta) for prompt, delta in deltas])
            if not self._generation.ended:
                return events, True
            return b"".join((events, *map(event, reply.last_chunks()), DONE)), False
        except Disconnected:
            raise
        except ApiError as error:
            return event(error.body), False
        except Exception:
            log.exception("a stream failed")
            return event(failed("internal error; the server's log has the details").body), False


@asynccontextmanager
async def _watched(generation: Generation, receive: Receive) -> AsyncIterator[None]:
    """Aborts ``generation`` as soon as the client hangs up."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.leave()

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
