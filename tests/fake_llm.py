"""What `AsyncLLM` looks like from the server, over an engine core in this process and the fake runner: no model."""

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from fake_core import fake_core
from fake_runner import Done
from paceline.checkpoint.chat_template import ChatTemplate
from paceline.checkpoint.generation import GenerationDefaults
from paceline.checkpoint.tokenizer import Tokenizer
from paceline.core import EngineCore
from paceline.engine.config import EngineConfig
from paceline.engine.limits import Limits
from paceline.engine.output import OutputProcessor
from paceline.engine.request import CoreOutput, CoreStats, Finish, Request
from paceline.engine.sampling_params import SamplingParams
from paceline.engine.step import Step, TokenLogprobs
from paceline.ipc.errors import EngineDead
from paceline.ipc.link import Open
from paceline.ipc.stream import Receiver
from tiny_vocabularies import BOS, EOS, byte_level

TEMPLATE = """\
{% for message in messages %}
{% if message.role not in ('system', 'user', 'assistant', 'tool') %}
{{ raise_exception('unknown role ' + message.role) }}
{% endif %}
{% if loop.index0 > 0 and messages[loop.index0 - 1].role == message.role %}
{{ raise_exception('roles must alternate') }}
{% endif %}
{{ bos_token if loop.first }}[{{ message.role }}]{{ message.content }}</s>
{% endfor %}
{{ '[assistant]' if add_generation_prompt }}{{ '[quiet]' if quiet }}"""


def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level(), bos_token=BOS, eos_token=EOS)


VOCAB_SIZE = tokenizer().vocab_size


class FakeLLM:
    """Tokens come from `fake_runner.next_token`.

    Args:
        delay_s: how long a step takes.
        sampling: defaults of the checkpoint.
        core: for `fake_core`.
    """

    def __init__(self, *, delay_s: float = 0.0, sampling: dict[str, Any] | None = None, **core: Any) -> None:
        self.config = EngineConfig(model="fake")
        self.tokenizer = tokenizer()
        self.chat_template: ChatTemplate | None = ChatTemplate(TEMPLATE, special_tokens={"bos_token": BOS})
        self.error: str | None = None
        self.leaks = 0
        self.submitted: list[Request] = []
        options = {"vocab_size": VOCAB_SIZE, "sampled_by_seed": True, "num_blocks": 2048, **core}
        self.core = with_alternatives(fake_core(delay_s=delay_s, **options))
        self.generation = GenerationDefaults(core.get("eos_ids", ()), sampling or {})
        self.limits: Limits = self.core.limits
        self.stats: CoreStats = self.core.stats
        self._delay_s = delay_s
        self._ids = itertools.count()
        self._open: dict[int, Open] = {}
        self._commands: list[Callable[[], None]] = []
        self._work = asyncio.Event()
        self._idle = asyncio.Event()

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    @property
    def open_requests(self) -> int:
        return len(self._open)

    def send(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        receiver: Receiver,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> int:
        if self.error is not None:
            raise EngineDead(self.error)
        self.limits.check(prompt_ids, params)
        seed = secrets.randbits(62) if params.seed is None else params.seed
        request = Request(
            id=next(self._ids),
            prompt=list(prompt_ids),
            params=params,
            seed=seed,
            arrival=time.monotonic(),
            priority=priority,
            cache_salt=cache_salt,
        )
        self.submitted.append(request)
        processor = OutputProcessor(self.tokenizer.backend, prompt_ids, params)
        self._open[request.id] = Open(processor, receiver, params.n)
        self._tell(lambda: self.core.add(request))
        return request.id

    def die(self, reason: str) -> None:
        """As when the engine process ends."""
        self.error = reason
        self._task.cancel()
        for request in list(self._open):
            self._open.pop(request).receiver.end(EngineDead(reason))

    async def check_idle(self) -> None:
        """Waits for the end of all work; asserts that nothing is left of it."""
        async with asyncio.timeout(10):
            await self._idle.wait()
        assert not self._open
        self.core.check_idle()
        assert (self.core.stats.running, self.core.stats.waiting) == (0, 0)

    def _tell(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._idle.clear()
        self._work.set()

    def abort(self, request_id: int) -> None:
        request = self._open.pop(request_id, None)
        if request is None:
            return
        for candidate in range(request.candidates):
            delta = request.processor.push(CoreOutput(request=request_id, candidate=candidate, finish=Finish.ABORT))
            if delta is not None:
                request.receiver.put(delta)
        request.receiver.end()
        self._tell(lambda: self.core.abort(request_id))

    async def _run(self) -> None:
        while True:
            commands, self._commands = self._commands, []
            for command in commands:
                command()
            if not self.core.has_work:
                self.stats = self.core.stats
                self._work.clear()
                self._idle.set()
                await self._work.wait()
                continue
            outputs = await asyncio.to_thread(self.core.step) if self._delay_s else self.core.step()
            self.stats = self.core.stats
            for output in outputs:
                self._dispatch(output)
            await asyncio.sleep(0)

    def _dispatch(self, output: CoreOutput) -> None:
        request = self._open.get(output.request)
        delta = None if request is None else request.processor.push(output)
        if request is None or delta is None:
            return
        request.receiver.put(delta)
        if request.processor.finished:
            del self._open[output.request]
            request.receiver.end()
        if delta.finish is not None and output.finish is None:
            self._tell(lambda: self.core.abort(output.request, output.candidate))


def with_alternatives(core: EngineCore) -> EngineCore:
    """Adds to every log-probability the alternatives that were asked for: the token itself, then its successors, the
    last one impossible (minus infinity)."""
    runner: Any = core._runner
    plain = runner.submit

    def enrich(entry: TokenLogprobs, k: int) -> None:
        token = -int(entry.logprob)
        entry.top_ids = [(token + i) % runner.vocab_size for i in range(k)]
        entry.top_logprobs = [entry.logprob - i if i < max(1, k - 1) else -float("inf") for i in range(k)]

    def submit(step: Step) -> Done:
        done = plain(step)
        assert not isinstance(done.value, Exception)
        for row, entries in done.value.logprobs.items():
            for entry in entries:
                enrich(entry, runner.rows[row].start.params.logprobs)
        for row, (_, entries) in done.value.prompt_logprobs.items():
            for entry in entries:
                enrich(entry, runner.rows[row].start.prompt_logprobs)
        return done

    runner.submit = submit
    return core
