"""`LLM` and `AsyncLLM` over the fake runner: prompts in, answers out, nothing left behind."""

import asyncio
import io
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import engine_factories
from fake_core import fake_core
from fake_runner import next_token
from paceline import LLM, AsyncLLM, SamplingParams
from paceline.checkpoint.chat_template import chat_prompt
from paceline.checkpoint.error import CheckpointError
from paceline.core import EngineCore
from paceline.engine.config import EngineConfig
from paceline.engine.invalid import InvalidRequest
from paceline.engine.output import RequestOutput
from paceline.engine.request import Finish, Request
from paceline.ipc.errors import EngineDead

Make = Callable[..., LLM]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return engine_factories.write_folder(tmp_path / "model")


@pytest.fixture
def make(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """An LLM over a fake core with these options; the core is at ``llm._core``."""
    made: list[LLM] = []

    def make_one(**options: Any) -> LLM:
        monkeypatch.setattr("paceline.llm.build_core", lambda config, progress: fake_core(**options))
        made.append(LLM(str(folder)))
        return made[-1]

    yield make_one
    for llm in made:
        llm.close()


def core_of(llm: LLM) -> EngineCore:
    assert llm._core is not None
    return llm._core


def seen_by(core: EngineCore) -> list[Request]:
    """Requests that the core gets from now on."""
    requests: list[Request] = []
    add = core.add

    def note(request: Request) -> None:
        requests.append(request)
        add(request)

    core.add = note  # type: ignore[method-assign]
    return requests


def continued(prompt: list[int], count: int, seed: int = 0, candidate: int = 0) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, 97, seed, candidate))
    return tokens[len(prompt) :]


def text_of(ids: list[int]) -> str:
    return "".join(engine_factories.VOCABULARY[token] for token in ids)


def ids_of(text: str) -> list[int]:
    return [engine_factories.VOCABULARY.index(letter) for letter in text]


def tokens(answers: list[RequestOutput]) -> list[list[int]]:
    return [answer.outputs[0].token_ids for answer in answers]


# Prompts


@pytest.mark.parametrize(
    ("prompts", "wanted"),
    [
        ("Hello", [ids_of("Hello")]),
        ([1, 2, 3], [[1, 2, 3]]),
        (["Hello", "you"], [ids_of("Hello"), ids_of("you")]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (("Hello", (4, 5)), [ids_of("Hello"), [4, 5]]),
        ([], []),
    ],
)
def test_every_form_of_prompt(make: Make, prompts: Any, wanted: list[list[int]]) -> None:
    answers = make().generate(prompts, SamplingParams(max_tokens=5))
    assert [answer.prompt_ids for answer in answers] == wanted
    assert tokens(answers) == [continued(prompt, 5) for prompt in wanted]
    assert [answer.outputs[0].text for answer in answers] == [text_of(continued(prompt, 5)) for prompt in wanted]


@pytest.mark.parametrize("depth", [1, 2])
def test_answers_come_in_the_order_of_the_prompts(make: Make, depth: int) -> None:
    llm = make(depth=depth, max_num_seqs=3)
    prompts = [[number] * (1 + number % 7) for number in range(20)]
    params = [SamplingParams(max_tokens=1 + (7 * number) % 20, n=1 + number % 2) for number in range(20)]
    answers = llm.generate(prompts, params)
    for prompt, one, answer in zip(prompts, params, answers, strict=True):
        assert answer.finished
        assert answer.usage.completion_tokens == one.n * (one.max_tokens or 0)
        for output in answer.outputs:
            assert output.token_ids == continued(prompt, one.max_tokens or 0)
    core_of(llm).check_idle()


@pytest.mark.parametrize(
    ("prompts", "field"),
    [
        ("", "prompt"),
        ([[]], "prompt"),
        ([[1], [97]], "prompt"),
        ([[1], [-1]], "prompt"),
        ([2**62], "prompt"),
        ([True, 5], "prompt"),
        ([1.5], "prompt"),
        ([1, "a"], "prompt"),
        (["a", 1], "prompt"),
        (["fine", None], "prompt"),
        (["fine", b"bytes"], "prompt"),
        (7, "prompt"),
        (["fine", "\ud800"], "prompt"),
        (["fine", [1] * 256], "prompt"),
        (["fine", [1] * 250], "max_tokens"),
    ],
)
def test_bad_prompts_are_refused_before_anything_runs(make: Make, prompts: Any, field: str) -> None:
    """failure 32: ids out of range never reach the embedding; the next request is served."""
    llm = make()
    requests = seen_by(core_of(llm))
    with pytest.raises(InvalidRequest) as caught:
        llm.generate(prompts, SamplingParams(max_tokens=9))
    assert caught.value.field == field
    assert requests == []
    assert tokens(llm.generate([5], SamplingParams(max_tokens=3))) == [continued([5], 3)]


def test_one_sampling_params_each(make: Make) -> None:
    with pytest.raises(ValueError, match="2 prompts but 1 sampling_params"):
        make().generate(["a", "b"], [SamplingParams()])


# Sampling


def test_defaults_are_the_checkpoints(make: Make) -> None:
    llm = make()
    requests = seen_by(core_of(llm))
    llm.generate("a")
    llm.chat([{"role": "user", "content": "a"}])
    assert requests[0].params == SamplingParams(temperature=0.25, top_p=0.75)
    assert requests[1].params == SamplingParams(temperature=0.25, top_p=0.75, max_tokens=None)


def test_without_a_seed_every_request_draws_its_own(make: Make) -> None:
    """failure 20: the same prompt at once and one by one, with no seed; a seed repeats, whatever else runs."""
    llm = make(sampled_by_seed=True)
    free = SamplingParams(max_tokens=12, n=2)
    answers = llm.generate(["Hello"] * 20, free) + [llm.generate("Hello", free)[0] for _ in range(20)]
    assert len({output.text for answer in answers for output in answer.outputs}) == 80
    seeded = SamplingParams(max_tokens=12, seed=-5)
    mixed = llm.generate(["Hello"] * 3, [free, seeded, seeded])
    wanted = continued(ids_of("Hello"), 12, seed=-5)
    assert tokens(mixed)[1:] == [wanted, wanted]
    assert tokens(llm.generate("Hello", seeded)) == [wanted]


def test_stop_string(make: Make) -> None:
    llm = make()
    text = text_of(continued([1], 30))
    answer = llm.generate([1], SamplingParams(max_tokens=200, stop=(text[9:12],), logprobs=0))[0].outputs[0]
    assert answer.text == text[: text.index(text[9:12])]
    assert (answer.finish_reason, answer.stop_reason) == (Finish.STOP, text[9:12])
    assert len(answer.token_ids) == len(answer.logprobs or []) == text.index(text[9:12]) + 3
    assert core_of(llm).stats.steps < 20
    core_of(llm).check_idle()


def test_chat(make: Make, folder: Path) -> None:
    """failure 34, offline path: the conversation's ids are those of `chat_prompt`."""
    llm = make()
    conversations = [[{"role": "user", "content": text}] for text in ("Hi", "Who?")]
    template = llm.chat_template
    assert template is not None
    wanted = [chat_prompt(llm.tokenizer, template, conversation) for conversation in conversations]
    params = SamplingParams(max_tokens=4)
    assert [answer.prompt_ids for answer in llm.chat(conversations, params)] == wanted
    assert [answer.prompt_ids for answer in llm.chat(conversations[0], params)] == wanted[:1]
    bare = llm.chat(conversations[0], params, add_generation_prompt=False)[0].prompt_ids
    assert text_of(bare) == "[user] Hi "


def test_chat_needs_a_template(make: Make, folder: Path) -> None:
    engine_factories.write_folder(folder, chat_template=None)
    llm = make()
    with pytest.raises(InvalidRequest, match="no chat template"):
        llm.chat([{"role": "user", "content": "Hi"}])
    with pytest.raises(InvalidRequest):
        llm.chat("Hi")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tools": None}, "tools"),
        ({"temperature": 0}, "temperature"),
        ({"add_generation_prompt": "no"}, "add_generation_prompt"),
        ({"continue_final_message": 1}, "continue_final_message"),
        ({"kwargs": ["x"]}, "kwargs"),
    ],
)
def test_chat_options_without_effect_are_refused(make: Make, options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make().chat([{"role": "user", "content": "Hi"}], **options)
    assert caught.value.field == field


def test_tool_calls_are_refused(make: Make) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    with pytest.raises(InvalidRequest, match="messages: message 1: tool_calls are not supported"):
        make().chat(asked)
    with pytest.raises(InvalidRequest, match="messages: must be a list"):
        make().chat([asked[:1], 5])  # type: ignore[list-item]


@pytest.mark.parametrize("params", [5, {"temperature": 0}, "greedy", [None]])
def test_other_sampling_params_are_refused(make: Make, params: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^sampling_params: "):
        make().generate("a", params)


@pytest.mark.parametrize("shown", [True, False])
def test_progress_bar_on_a_terminal(make: Make, monkeypatch: pytest.MonkeyPatch, shown: bool) -> None:
    llm = make()
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", terminal)
    llm.generate(["a", "b"], SamplingParams(max_tokens=5), progress=shown)
    assert ("2/2" in terminal.getvalue() and "10 tokens" in terminal.getvalue()) == shown


# Interruptions


@pytest.mark.parametrize("depth", [1, 2])
def test_interrupt_leaves_the_core_idle(make: Make, depth: int) -> None:
    llm = make(depth=depth, delay_s=0.01)
    before = signal.getsignal(signal.SIGINT)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"] * 10, SamplingParams(max_tokens=200))
    assert signal.getsignal(signal.SIGINT) is before
    assert not core_of(llm).has_work
    core_of(llm).check_idle()
    assert tokens(llm.generate([5], SamplingParams(max_tokens=3))) == [continued([5], 3)]


def test_second_interrupt_cuts_the_step(make: Make) -> None:
    llm = make()
    core = core_of(llm)

    def step() -> list[Any]:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        raise AssertionError("unreachable")

    core.step = step  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.generate("a")
    with pytest.raises(RuntimeError, match="make a new one"):
        llm.generate("a")


def test_generate_in_another_thread(make: Make) -> None:
    llm = make()
    answers: list[RequestOutput] = []
    thread = threading.Thread(target=lambda: answers.extend(llm.generate([1], SamplingParams(max_tokens=3))))
    thread.start()
    thread.join()
    assert tokens(answers) == [continued([1], 3)]


def test_an_error_outside_the_core_leaves_it_idle(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make()
    count = itertools.count()

    def fail(answer: RequestOutput, delta: Any) -> None:
        if next(count) == 5:
            raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(RequestOutput, "add", fail)
        with pytest.raises(MemoryError):
            llm.generate(["a", "b", "c"], SamplingParams(max_tokens=50))
    core_of(llm).check_idle()
    assert tokens(llm.generate([5], SamplingParams(max_tokens=3))) == [continued([5], 3)]


def test_a_runner_failure_ends_the_llm(make: Make) -> None:
    llm = make()
    core = core_of(llm)

    def step() -> list[Any]:
        raise RuntimeError("the device is on fire")

    core.step = step  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="on fire"):
        llm.generate("a")
    with pytest.raises(RuntimeError, match="make a new one"):
        llm.generate("a")


def test_closed(make: Make) -> None:
    with make() as llm:
        pass
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("a")


def test_unknown_model_and_unknown_knob(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        LLM(str(tmp_path / "nothing"))
    with pytest.raises(TypeError):
        LLM("smollm2", no_such_knob=1)


# AsyncLLM


def service(folder: Path, core: str = "quick") -> AsyncLLM:
    return AsyncLLM(EngineConfig(model=str(folder)), core=f"engine_factories:{core}")


async def test_async_generate_grows(folder: Path) -> None:
    async with service(folder) as llm:
        assert llm.limits.vocab_size == 97
        assert llm.chat_template is not None
        assert llm.generation.sampling == {"temperature": 0.25, "top_p": 0.75, "top_k": 0}
        texts = []
        async for answer in llm.generate("Hello", SamplingParams(max_tokens=30, n=2, seed=3)):
            texts.append(answer.outputs[0].text)
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
        assert answer.finished
        for output in answer.outputs:
            assert output.token_ids == continued(ids_of("Hello"), 30, 3, output.index)
        answer = [answer async for answer in llm.generate([1, 2])][-1]
        assert len(answer.outputs[0].token_ids) == 16
        assert llm.error is None
        assert llm.leaks == 0


async def test_async_and_in_process_agree(folder: Path, make: Make) -> None:
    params = SamplingParams(max_tokens=40, logprobs=0, prompt_logprobs=0, n=2, seed=9, stop=("x", "7Q"))
    wanted = make(sampled_by_seed=True).generate("Hello you", params)[0]
    async with service(folder) as llm:
        answer = [answer async for answer in llm.generate("Hello you", params)][-1]
    assert answer.outputs == wanted.outputs
    assert [output.text for output in answer.outputs] == [output.text for output in wanted.outputs]
    assert answer.prompt_logprobs == wanted.prompt_logprobs
    assert answer.usage == wanted.usage


async def test_async_requests_without_a_seed_differ(folder: Path) -> None:
    """failure 20: and failure 43, equal requests at the same moment do not meet."""
    async with service(folder) as llm:

        async def one() -> str:
            deltas = [delta async for delta in llm.submit([1, 2], SamplingParams(max_tokens=12))]
            return "".join(delta.text for delta in deltas)

        at_once = await asyncio.gather(*(one() for _ in range(20)))
        one_by_one = [await one() for _ in range(20)]
        assert len({*at_once, *one_by_one}) == 40


async def test_async_leaving_generate_early_aborts(folder: Path) -> None:
    async with service(folder, "paced") as llm:
        async for answer in llm.generate("Hello", SamplingParams(max_tokens=900)):
            assert answer.outputs[0].finish_reason is None
            break
        deadline = time.monotonic() + 4
        while llm.open_requests or llm.stats.running:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)


async def test_async_refuses_bad_requests(folder: Path) -> None:
    async with service(folder) as llm:
        for prompt in ([], [97], [True], [1.5], ["a"], [1] * 2000):
            with pytest.raises(InvalidRequest):
                llm.submit(prompt, SamplingParams())
        with pytest.raises(InvalidRequest):
            llm.submit([1], SamplingParams(stop_token_ids=(1000,)))
        with pytest.raises(InvalidRequest):
            llm.submit([1], SamplingParams(), cache_salt="\ud800")
        for field, value in (
            ("priority", "a"),
            ("priority", 1.5),
            ("priority", True),
            ("priority", None),
            ("priority", 2**63),
            ("cache_salt", 5),
            ("cache_salt", None),
            ("cache_salt", b"x"),
            ("cache_salt", "\ud800"),
        ):
            options: dict[str, Any] = {field: value}
            with pytest.raises(InvalidRequest) as caught:
                llm.submit([1], SamplingParams(), **options)
            assert caught.value.field == field
        nothings: tuple[Any, ...] = (None, 5, {})
        for anything in nothings:
            with pytest.raises(InvalidRequest):
                llm.submit([1], anything)
            with pytest.raises(InvalidRequest):
                llm.submit(anything, SamplingParams())
        assert llm.open_requests == 0
        assert len([delta async for delta in llm.submit([1], SamplingParams(max_tokens=3))]) > 0


async def test_async_starts_once(folder: Path) -> None:
    """A second engine would be nobody's: it is refused, while the first loads and after."""
    children = psutil.Process().children
    before = len(children())
    llm = service(folder)
    first = asyncio.create_task(llm.start())
    await asyncio.sleep(0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="started already"):
            await llm.start()
        await first
    assert len(children()) == before + 1
    await llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        await llm.start()
    assert len(children()) == before


async def test_async_closed_while_it_starts(folder: Path) -> None:
    before = len(psutil.Process().children())
    llm = service(folder)
    start = asyncio.create_task(llm.start())
    await asyncio.sleep(0)
    await llm.close()
    with pytest.raises(RuntimeError, match="closed while it started"):
        await start
    assert len(psutil.Process().children()) == before


async def test_async_start_errors(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        await service(tmp_path / "nothing").start()
    with pytest.raises(EngineDead, match=r"model\.norm\.weight is missing"):
        await service(folder, "unwilling").start()
    llm = service(folder)
    with pytest.raises(RuntimeError, match="start"):
        llm.submit([1], SamplingParams())
    await llm.close()
