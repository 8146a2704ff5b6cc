"""Answers from an engine of our own."""

import asyncio
import threading
from collections.abc import Coroutine, Generator
from types import TracebackType
from typing import Any, Self

from paceline.async_llm import AsyncLLM
from paceline.checkpoint.chat_template import chat_prompt
from paceline.cli.conversation import Message
from paceline.engine.config import EngineConfig
from paceline.engine.invalid import InvalidRequest
from paceline.engine.output import Delta
from paceline.engine.request import Finish
from paceline.engine.sampling_params import SamplingParams
from paceline.ipc.stream import RequestStream


class LocalChat:
    """Runs an `AsyncLLM` on a thread, so that its link stays alive while the main thread waits for a key.

    Raises:
        CheckpointError, EngineDead: from ``with``: the model cannot be loaded.
    """

    def __init__(self, config: EngineConfig, sampling: dict[str, Any]) -> None:
        self._llm = AsyncLLM(config)
        self._sampling = sampling
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="paceline-chat", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._run(self._llm.start())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._run(self._llm.close())
        self._stop()

    def reply(self, messages: list[Message]) -> Generator[str, None, None]:
        template = self._llm.chat_template
        if template is None:
            raise InvalidRequest("messages", "this model has no chat template; it can complete text but not chat")
        prompt = chat_prompt(self._llm.tokenizer, template, messages)
        params = SamplingParams(**{"max_tokens": None, **self._llm.generation.sampling, **self._sampling})
        stream = self._run(self._submit(prompt, params))
        try:
            while (delta := self._run(_next(stream))) is not None:
                if delta.finish is Finish.ERROR:
                    raise InvalidRequest("messages", delta.error)
                yield delta.text
        finally:
            self._loop.call_soon_threadsafe(stream.abort)

    async def _submit(self, prompt: list[int], params: SamplingParams) -> RequestStream:
        return self._llm.submit(prompt, params)

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of a coroutine that the thread's loop runs; a Ctrl-C cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _next(stream: RequestStream) -> Delta | None:
    return await anext(stream, None)
