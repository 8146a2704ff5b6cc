"""The Python API: `LLM` runs the engine in this process, `AsyncLLM` in a process of its own."""

import asyncio
import itertools
import logging
import secrets
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType, TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from paceline.checkpoint.chat_template import ChatTemplate, chat_prompt
from paceline.checkpoint.checkpoint import Checkpoint, open_checkpoint
from paceline.checkpoint.generation import GenerationDefaults
from paceline.checkpoint.source import locate
from paceline.checkpoint.tokenizer import Tokenizer
from paceline.core import EngineCore, build_core
from paceline.engine.config import EngineConfig
from paceline.engine.invalid import InvalidRequest
from paceline.engine.limits import Limits
from paceline.engine.output import OutputProcessor, RequestOutput
from paceline.engine.request import CoreOutput, CoreStats, Request
from paceline.engine.sampling_params import SamplingParams
from paceline.ipc.client import EngineClient
from paceline.ipc.progress import StartProgress
from paceline.ipc.stream import RequestStream

log = logging.getLogger(__name__)

Prompt = str | Sequence[int]
"""Text, or token ids. Text gets the special tokens that the tokenizer adds by itself, such as a BOS."""

Message = Mapping[str, Any]
"""``{"role": ..., "content": ...}``, as chat templates take it."""


class _Front:
    """What turns prompts into requests: the parts of a checkpoint that need no weights."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.tokenizer: Tokenizer = checkpoint.tokenizer()
        self.chat_template: ChatTemplate | None = checkpoint.chat_template()
        self.generation: GenerationDefaults = checkpoint.generation
        self._ids = itertools.count()

    def defaults(self, **fields: Any) -> SamplingParams:
        return SamplingParams(**{**self.generation.sampling, **fields})

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if not _is_list(prompt):
            raise InvalidRequest("prompt", f"must be text or a list of token ids, not {prompt!r}")
        return list(prompt)

    def chat_ids(self, messages: Sequence[Message], options: Mapping[str, Any]) -> list[int]:
        if self.chat_template is None:
            raise InvalidRequest("messages", "the model has no chat template; use a plain prompt")
        return chat_prompt(self.tokenizer, self.chat_template, messages, **options)

    def request(
        self, prompt_ids: list[int], params: SamplingParams, *, priority: int = 0, cache_salt: str = ""
    ) -> Request:
        seed = secrets.randbits(64) - 2**63 if params.seed is None else params.seed
        return Request(
            id=next(self._ids),
            prompt=prompt_ids,
            params=params,
            seed=seed,
            arrival=time.monotonic(),
            priority=priority,
            cache_salt=cache_salt,
        )

    def processor(self, request: Request) -> OutputProcessor:
        return OutputProcessor(self.tokenizer.backend, request.prompt, request.params)


class LLM:
    """A model in this process, for batches of prompts. One thread at a time.

    Args:
        model: alias (``smollm2``), folder, GGUF file or hub id (``ORG/NAME``).
        knobs: fields of `EngineConfig`.

    Raises:
        CheckpointError: no such model, or one that cannot be used.
    """

    def __init__(self, model: str, **knobs: Any) -> None:
        self.config = EngineConfig(model=model, **knobs)
        path = locate(model)
        self._front = _Front(open_checkpoint(path))
        with StartProgress() as progress:
            self._core: EngineCore | None = build_core(replace(self.config, model=str(path)), progress)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._front.tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        return self._front.chat_template

    @property
    def limits(self) -> Limits:
        return self._live.limits

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Continues each prompt; returns the answers in the order of the prompts, a single prompt's in a list of one.

        Args:
            prompts: one prompt or a list of them; ``[]`` is an empty list of prompts.
            sampling_params: for all prompts, or one each. None: what the checkpoint's generation config states, and
                the defaults of `SamplingParams` for the rest.
            progress: show a bar, if standard error is a terminal.

        Raises:
            InvalidRequest: a prompt or its parameters cannot be served; then nothing was computed.
            ValueError: another number of sampling_params than of prompts.
        """
        many = _is_list(prompts) and (not prompts or isinstance(prompts[0], str) or _is_list(prompts[0]))
        batch: Sequence[Any] = prompts if many else [prompts]
        default = self._front.defaults()
        return self._run([self._front.prompt_ids(prompt) for prompt in batch], sampling_params, default, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them. Like `generate`, but without sampling_params a reply may use
        the whole context.

        Args:
            template_options: of `chat_prompt`, for example ``continue_final_message=True``.
        """
        if not _is_list(messages):
            raise InvalidRequest("messages", f"must be a list, not {messages!r}")
        many = not messages or _is_list(messages[0])
        batch: Sequence[Any] = messages if many else [messages]
        default = self._front.defaults(max_tokens=None)
        prompts = [self._front.chat_ids(conversation, template_options) for conversation in batch]
        return self._run(prompts, sampling_params, default, progress)

    def close(self) -> None:
        """Frees the model. The object cannot be used afterwards."""
        if self._core is not None:
            core, self._core = self._core, None
            core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _live(self) -> EngineCore:
        if self._core is None:
            raise RuntimeError("this LLM is closed, or its engine has failed; make a new one")
        return self._core

    def _run(
        self,
        prompts: list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        default: SamplingParams,
        progress: bool,
    ) -> list[RequestOutput]:
        core = self._live
        if params is None or isinstance(params, SamplingParams):
            params = [params or default] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(params)} sampling_params")
        for prompt, one in zip(prompts, params, strict=True):
            core.limits.check(prompt, one)
        requests = [self._front.request(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        jobs = {
            request.id: (self._front.processor(request), RequestOutput(request.prompt, request.params.n))
            for request in requests
        }
        answers = [answer for _, answer in jobs.values()]
        with _interrupts_held() as deliver_interrupt, _bar(progress) as bar:
            task = bar.add_task("prompts", total=len(jobs), tokens=0)
            tokens = 0
            try:
                for request in requests:
                    core.add(request)
                while core.has_work:
                    deliver_interrupt()
                    for output in self._step(core):
                        processor, answer = jobs[output.request]
                        if (delta := processor.push(output)) is None:
                            continue
                        answer.add(delta)
                        tokens += len(delta.ids)
                        if delta.finish is not None and output.finish is None:
                            core.abort(output.request, output.candidate)  # A stop string that only the text shows.
                        bar.update(task, advance=processor.finished, tokens=tokens)
            finally:
                self._settle(jobs)
        return answers

    def _step(self, core: EngineCore) -> list[CoreOutput]:
        try:
            return core.step()
        except BaseException:
            self._core = None  # A step that did not end leaves nothing to go on with.
            raise

    def _settle(self, request_ids: Iterable[int]) -> None:
        """Ends what has not ended, and leaves the core idle."""
        core = self._core
        if core is None:
            return
        for request_id in request_ids:
            core.abort(request_id)
        while core.has_work:
            self._step(core)
        try:
            core.check_idle()
        except AssertionError:
            log.exception("the engine is idle, yet something is still held; please report this")


class AsyncLLM:
    """A model in an engine process of its own, for many requests at once from one event loop.

    Args:
        config: of the engine.
        core: ``module:function`` that builds the core in the engine process.
        heartbeat_timeout: seconds without a sign of life after which the engine counts as stuck.
        step_timeout: seconds that one step may last.

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
        core: str = "paceline.core:build_core",
        heartbeat_timeout: float = 5.0,
        step_timeout: float = 120.0,
    ) -> None:
        self.config = config
        self._core = core
        self._heartbeat_timeout = heartbeat_timeout
        self._step_timeout = step_timeout
        self._client: EngineClient | None = None

    async def start(self) -> None:
        """Loads the model, showing progress. Raises CheckpointError or EngineDead with the reason if that fails."""
        path = await asyncio.to_thread(locate, self.config.model)
        self._front = await asyncio.to_thread(lambda: _Front(open_checkpoint(path)))
        self.tokenizer = self._front.tokenizer
        self.chat_template = self._front.chat_template
        self.generation = self._front.generation
        with StartProgress() as progress:
            client = EngineClient(
                replace(self.config, model=str(path)),
                core=self._core,
                heartbeat_timeout=self._heartbeat_timeout,
                step_timeout=self._step_timeout,
                on_progress=progress,
            )
            await client.start()
        self._client = client

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

    @property
    def engine_pid(self) -> int | None:
        return self._started.pid

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
        client = self._started
        client.limits.check(prompt_ids, params)
        request = self._front.request(list(prompt_ids), params, priority=priority, cache_salt=cache_salt)
        return client.submit(request, self._front.processor(request))

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[RequestOutput]:
        """The answer as it grows: the same object again and again, each time with more in it.

        Args:
            params: None means what it means in `LLM.generate`.
        """
        params = params or self._front.defaults()
        prompt_ids = self._front.prompt_ids(prompt)
        async with self.submit(prompt_ids, params) as stream:
            answer = RequestOutput(prompt_ids, params.n)
            async for delta in stream:
                answer.add(delta)
                yield answer

    async def close(self, *, drain_s: float = 0.0) -> None:
        """Waits up to ``drain_s`` seconds for open requests, aborts the rest and ends the engine in bounded time."""
        if self._client is not None:
            await self._client.close(drain_s=drain_s)

    @property
    def _started(self) -> EngineClient:
        if self._client is None:
            raise RuntimeError("call start() first")
        return self._client


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _bar(shown: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        console=Console(stderr=True),
        disable=not (shown and sys.stderr.isatty()),
    )


@contextmanager
def _interrupts_held() -> Iterator[Callable[[], None]]:
    """Keeps a Ctrl-C until the function that it yields is called, so that no step is cut in the middle. A second one
    is delivered at once."""
    before = signal.getsignal(signal.SIGINT)
    held: list[tuple[int, FrameType | None]] = []

    def deliver() -> None:
        if held and callable(before):
            before(*held.pop())

    def hold(number: int, frame: FrameType | None) -> None:
        held.append((number, frame))
        if len(held) > 1:
            deliver()

    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield deliver
        return
    signal.signal(signal.SIGINT, hold)
    try:
        yield deliver
    finally:
        signal.signal(signal.SIGINT, before)
    deliver()
