"""The Python API for many requests at once: the engine runs in a process of its own."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from paceline.checkpoint.chat_template import ChatTemplate
from paceline.checkpoint.checkpoint import open_checkpoint
from paceline.checkpoint.generation import GenerationDefaults
from paceline.checkpoint.source import locate
from paceline.checkpoint.tokenizer import Tokenizer
from paceline.engine.config import EngineConfig
from paceline.engine.limits import Limits
from paceline.engine.output import RequestOutput
from paceline.engine.request import CoreStats
from paceline.engine.sampling_params import SamplingParams
from paceline.front import Front, Prompt
from paceline.ipc.client import EngineClient
from paceline.ipc.link import EngineLink
from paceline.ipc.messages import CLIENT_SHIFT, Seat
from paceline.ipc.progress import StartProgress
from paceline.ipc.stream import Channel, Receiver, RequestStream


class AsyncLLM:
    """A model in an engine process of its own, for many requests at once from one event loop.

    Args:
        config: of the engine.
        core: ``module:function`` that builds the core in the engine process.
        heartbeat_timeout: seconds without a sign of life after which the engine counts as stuck.
        step_timeout: seconds that one step may last.
        join: use the engine process that another client has started, ``config`` and ``core`` being the same, instead
            of a new one.

    Attributes:
        tokenizer, chat_template, generation: of the checkpoint. Set by `start`.
    """

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    generation: GenerationDefaults

    def __init__(
        self,
        config: EngineConfig,
        *,
        core: str = "paceline.core:build_served_core",
        heartbeat_timeout: float = 5.0,
        step_timeout: float = 120.0,
        join: Seat | None = None,
    ) -> None:
        self.config = config
        self._core = core
        self._heartbeat_timeout = heartbeat_timeout
        self._step_timeout = step_timeout
        self._join = join
        self._client: EngineLink | None = None
        self._begun = False
        self._closed = False

    async def start(self) -> None:
        """Loads the model, showing progress. A start that failed may be repeated.

        Raises:
            CheckpointError, EngineDead: with the reason, when that fails.
            RuntimeError: it was started or closed before.
        """
        if self._closed:
            raise RuntimeError("this AsyncLLM is closed; make a new one")
        if self._begun:
            raise RuntimeError("this AsyncLLM has been started already")
        self._begun = True
        try:
            client = await self._load()
            if self._closed:
                await client.close()
                raise RuntimeError("this AsyncLLM was closed while it started")
        except BaseException:
            self._begun = False
            raise
        self._client = client

    async def _load(self) -> EngineLink:
        path = await asyncio.to_thread(locate, self.config.model)
        first_id = 0 if self._join is None else self._join.number << CLIENT_SHIFT
        self._front = await asyncio.to_thread(lambda: Front(open_checkpoint(path), first_id))
        self.tokenizer = self._front.tokenizer
        self.chat_template = self._front.chat_template
        self.generation = self._front.generation
        timeouts = {"heartbeat_timeout": self._heartbeat_timeout, "step_timeout": self._step_timeout}
        if self._join is not None:
            link = EngineLink(self._join.number, **timeouts)
            await link.join(self._join.folder)
            return link
        with StartProgress() as progress:
            client = EngineClient(
                replace(self.config, model=str(path)),
                core=self._core,
                on_progress=progress,
                **timeouts,
            )
            await client.start()
        return client

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def limits(self) -> Limits:
        return self._started.limits

    @property
    def stats(self) -> CoreStats:
        """State of the engine after its latest step."""
        return self._started.stats

    @property
    def error(self) -> str | None:
        """Why the engine is dead or stuck; None: healthy. A stuck engine may recover."""
        return self._started.error

    @property
    def leaks(self) -> int:
        """Idle checks that failed in the engine: each is a bug."""
        return self._started.leaks

    @property
    def open_requests(self) -> int:
        """Requests that have not ended."""
        return self._started.open_requests

    def submit(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, priority: int = 0, cache_salt: str = ""
    ) -> RequestStream:
        """Starts a request and returns its stream of deltas; leaving the stream early aborts the request.

        Args:
            prompt_ids: token ids.
            priority: lower runs first.
            cache_salt: requests share cached prefixes only with requests of the same salt.

        Raises:
            InvalidRequest: the request cannot be served.
            EngineDead: the engine cannot serve.
        """
        channel = Channel()
        request_id = self.send(prompt_ids, params, channel, priority=priority, cache_salt=cache_salt)
        return RequestStream(request_id, channel, self.abort)

    def send(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        receiver: Receiver,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> int:
        """Like `submit`, with the deltas pushed to ``receiver`` as they come; returns the request's id, for `abort`."""
        link = self._started
        link.limits.check(prompt_ids, params)
        request = self._front.request(list(prompt_ids), params, priority=priority, cache_salt=cache_salt)
        link.send(request, self._front.processor(request), receiver)
        return request.id

    def abort(self, request_id: int) -> None:
        """Ends a request; does nothing when it has ended. Each candidate still open brings one more delta, with
        ``Finish.ABORT``."""
        self._started.abort(request_id)

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[RequestOutput]:
        """The answer as it grows: the same object again and again, each time with more in it.

        Args:
            params: None means what it means in `LLM.generate`.
        """
        params = self._front.defaults() if params is None else params
        prompt_ids = self._front.prompt_ids(prompt)
        async with self.submit(prompt_ids, params) as stream:
            answer = RequestOutput(prompt_ids, params.n)
            async for delta in stream:
                answer.add(delta)
                yield answer

    async def close(self, *, drain_s: float = 0.0) -> None:
        """Waits up to ``drain_s`` seconds for open requests, aborts the rest and ends the engine in bounded time."""
        self._closed = True
        if self._client is not None:
            await self._client.close(drain_s=drain_s)

    @property
    def _started(self) -> EngineLink:
        if self._client is None:
            raise RuntimeError("call start() first")
        return self._client
