"""`paceline chat MODEL`: an engine process of its own, with a fake runner in it."""

import functools
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import engine_factories
from fake_runner import next_token
from paceline.async_llm import AsyncLLM
from paceline.checkpoint.chat_template import chat_prompt
from paceline.cli.app import app
from paceline.cli.conversation import Message
from paceline.cli.local import LocalChat
from paceline.engine.config import EngineConfig
from paceline.engine.invalid import InvalidRequest
from paceline.ipc.errors import EngineDead

HELLO: list[Message] = [{"role": "user", "content": "hello"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return engine_factories.write_folder(tmp_path / "model")


def engine(core: str, monkeypatch: pytest.MonkeyPatch) -> None:
    factory = functools.partial(AsyncLLM, core=f"engine_factories:{core}")
    monkeypatch.setattr("paceline.cli.local.AsyncLLM", factory)


def expected(chat: LocalChat, messages: list[Message], seed: int, count: int) -> str:
    llm = chat._llm
    assert llm.chat_template is not None
    tokens = chat_prompt(llm.tokenizer, llm.chat_template, messages)
    prompt_len = len(tokens)
    for _ in range(count):
        tokens.append(next_token(tokens, len(engine_factories.VOCABULARY), seed))
    return llm.tokenizer.decode(tokens[prompt_len:])


def test_answers_are_those_of_the_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine("quick", monkeypatch)
    with LocalChat(EngineConfig(model=str(folder)), {"seed": 5, "max_tokens": 12}) as chat:
        assert "".join(chat.reply(HELLO)) == expected(chat, HELLO, 5, 12)
        longer = [*HELLO, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "bye"}]
        assert "".join(chat.reply(longer)) == expected(chat, longer, 5, 12)


def test_sampling_is_the_checkpoints_unless_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine("quick", monkeypatch)
    seen: list[Any] = []
    submit = AsyncLLM.submit

    def spy(self: AsyncLLM, prompt_ids: Any, params: Any, **more: Any) -> Any:
        seen.append(params)
        return submit(self, prompt_ids, params, **more)

    monkeypatch.setattr(AsyncLLM, "submit", spy)
    with LocalChat(EngineConfig(model=str(folder)), {"top_p": 0.5, "max_tokens": 2}) as chat:
        list(chat.reply(HELLO))
    assert (seen[0].temperature, seen[0].top_p, seen[0].max_tokens) == (0.25, 0.5, 2)


def test_leaving_an_answer_aborts_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine("paced", monkeypatch)
    with LocalChat(EngineConfig(model=str(folder)), {"max_tokens": 900}) as chat:
        answer = chat.reply(HELLO)
        next(answer)
        answer.close()
        assert chat._run(_open_requests(chat._llm)) == 0


async def _open_requests(llm: AsyncLLM) -> int:
    return llm.open_requests


def test_ctrl_c_while_waiting_for_the_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine("paced", monkeypatch)
    with LocalChat(EngineConfig(model=str(folder)), {"max_tokens": 900}) as chat:
        answer = chat.reply(HELLO)
        next(answer)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            list(answer)
        assert chat._run(_open_requests(chat._llm)) == 0
        assert next(chat.reply(HELLO)) is not None


def test_a_conversation_beyond_the_context_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine("quick", monkeypatch)
    with LocalChat(EngineConfig(model=str(folder)), {}) as chat:
        with pytest.raises(InvalidRequest, match="exceed the context of 1024"):
            next(chat.reply([{"role": "user", "content": "x" * 1100}]))
        assert next(chat.reply(HELLO)) is not None


def test_a_model_without_a_template_cannot_chat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine("quick", monkeypatch)
    folder = engine_factories.write_folder(tmp_path / "plain", chat_template=None)
    with (
        LocalChat(EngineConfig(model=str(folder)), {}) as chat,
        pytest.raises(InvalidRequest, match="no chat template"),
    ):
        next(chat.reply(HELLO))


def test_an_engine_that_cannot_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine("unwilling", monkeypatch)
    chat = LocalChat(EngineConfig(model=str(folder)), {})
    with pytest.raises(EngineDead, match=r"model\.norm\.weight is missing"), chat:
        pytest.fail("it started")
    assert not chat._thread.is_alive()


@pytest.mark.parametrize(
    ("core", "words"),
    [
        ("unwilling", "ValueError: model.norm.weight is missing from shard 2"),
        ("breaking", "RuntimeError: the device is on fire"),
        ("misfit", "kv_cache_bytes=1 gives 0.0 MiB"),
    ],
)
def test_a_dead_engine_is_one_line_and_exit_1(
    core: str, words: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine(core, monkeypatch)
    result = CliRunner().invoke(app, ["chat", str(folder)], input="hello")
    assert result.exit_code == 1
    assert result.output.endswith(f"Error: {words}\n")


def test_no_traceback_for_what_the_user_can_correct(folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    for core, logged in (("misfit", False), ("unwilling", True)):
        engine(core, monkeypatch)
        assert CliRunner().invoke(app, ["chat", str(folder)], input="hello").exit_code == 1
        assert ("Traceback" in caplog.text) == logged


def test_no_such_model() -> None:
    result = CliRunner().invoke(app, ["chat", "no/such/folder/"], input="hello")
    assert result.exit_code == 1
    assert result.output.startswith("Error: no model at 'no/such/folder/'")
    assert result.output.count("\n") == 1
