"""The Python API for batches: the engine runs in this process."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType, TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from paceline.checkpoint.chat_template import ChatTemplate
from paceline.checkpoint.checkpoint import open_checkpoint
from paceline.checkpoint.source import locate
from paceline.checkpoint.tokenizer import Tokenizer
from paceline.core import EngineCore, build_core
from paceline.engine.collector import calm_collector
from paceline.engine.config import EngineConfig
from paceline.engine.invalid import InvalidRequest
from paceline.engine.limits import Limits
from paceline.engine.output import RequestOutput
from paceline.engine.request import CoreOutput
from paceline.engine.sampling_params import SamplingParams
from paceline.front import Front, Message, Prompt, is_list
from paceline.ipc.progress import StartProgress

log = logging.getLogger(__name__)


class LLM:
    """A model in this process, for batches of prompts. One thread at a time.

    From then on Python's garbage collector runs more rarely in the process (`calm_collector`).

    Args:
        model: alias (``smollm2``), folder, GGUF file or hub id (``ORG/NAME``).
        knobs: fields of `EngineConfig`.

    Raises:
        CheckpointError: no such model, or one that cannot be used.
        InvalidConfig: a knob of the wrong type or out of range, or one that the model or the machine cannot meet.
    """

    def __init__(self, model: str | os.PathLike[str], **knobs: Any) -> None:
        self.config = EngineConfig(model=os.fspath(model) if isinstance(model, os.PathLike) else model, **knobs)
        path = locate(self.config.model)
        self._front = Front(open_checkpoint(path))
        with StartProgress() as progress:
            self._core: EngineCore | None = build_core(replace(self.config, model=str(path)), progress)
        calm_collector()

    @property
    def tokenizer(self) -> Tokenizer:
        return self._front.tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        return self._front.chat_template

    @property
    def limits(self) -> Limits:
        return self.core.limits

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
        many = is_list(prompts) and (not prompts or isinstance(prompts[0], str) or is_list(prompts[0]))
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
            template_options: ``add_generation_prompt``, ``continue_final_message`` and ``kwargs``, of `chat_prompt`.
                Tools and messages with tool calls are refused.
        """
        if not is_list(messages):
            raise InvalidRequest("messages", f"must be a list, not {messages!r}")
        many = not messages or is_list(messages[0])
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
    def core(self) -> EngineCore:
        """The engine, for whoever times requests one by one. Raises RuntimeError once it is closed or has failed."""
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
        core = self.core
        # Whatever else it is, the limits refuse it.
        one_for_all: Any = default if params is None else params
        each: Sequence[Any] = one_for_all if is_list(one_for_all) else [one_for_all] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(each)} sampling_params")
        for prompt, one in zip(prompts, each, strict=True):
            core.limits.check(prompt, one)
        requests = [self._front.request(prompt, one) for prompt, one in zip(prompts, each, strict=True)]
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
                    finished = 0
                    for output in self._step(core):
                        processor, answer = jobs[output.request]
                        if (delta := processor.push(output)) is None:
                            continue
                        answer.add(delta)
                        tokens += len(delta.ids)
                        if delta.finish is not None and output.finish is None:
                            core.abort(output.request, output.candidate)  # A stop string that only the text shows.
                        finished += processor.finished
                    bar.update(task, advance=finished, tokens=tokens)
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
