"""The conversation loop, and the answers of a running server."""

import io
import json
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.cli.conversation import Message, converse
from paceline.cli.remote import RemoteChat
from paceline.engine.invalid import InvalidRequest


@dataclass
class Script:
    """Answers in order; a piece that is an exception is raised instead."""

    answers: list[list[str | BaseException]]
    asked: list[list[Message]] = field(default_factory=list)
    closed: int = 0

    def reply(self, messages: list[Message]) -> Generator[str, None, None]:
        self.asked.append(list(messages))
        try:
            for piece in self.answers[len(self.asked) - 1]:
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            self.closed += 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def talk(
    script: Script, lines: list[str | type[BaseException]], monkeypatch: pytest.MonkeyPatch, system: str = ""
) -> str:
    """What the terminal shows when a user types ``lines``, then Ctrl-D."""
    typed = iter(lines)

    def read(prompt: str) -> str:
        line = next(typed, EOFError)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
    out = io.StringIO()
    converse(script, [{"role": "system", "content": system}] if system else [], Terminal(), out)
    return out.getvalue()


def test_turns_carry_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script([["Hel", "lo"], ["Good"]])
    shown = talk(script, ["hi", "", "how are you?"], monkeypatch, system="Be kind.")
    assert shown == "Hello\nGood\n\n"
    assert script.asked[1] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "how are you?"},
    ]


def test_ctrl_c_stops_the_answer_and_not_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script([["One, two", KeyboardInterrupt()], ["Yes."]])
    shown = talk(script, ["count", "still there?"], monkeypatch)
    assert shown == "One, two [stopped]\nYes.\n\n"
    assert script.asked[1][1] == {"role": "assistant", "content": "One, two"}
    assert script.closed == 2


def test_ctrl_c_at_the_prompt_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script([["never"]])
    assert talk(script, [KeyboardInterrupt, "hi"], monkeypatch) == "\n"
    assert script.asked == []


def test_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script([["a"], ["b"]])
    shown = talk(script, ["one", "/clear", "/what", "two", "/quit", "three"], monkeypatch, system="S")
    assert "Commands: /clear" in shown
    assert script.asked[1] == [{"role": "system", "content": "S"}, {"role": "user", "content": "two"}]
    assert len(script.asked) == 2


def test_a_refused_turn_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script([[InvalidRequest("prompt", "exceeds the context")], ["ok"]])
    shown = talk(script, ["very long", "short"], monkeypatch)
    assert "Error: prompt: exceeds the context" in shown
    assert script.asked[1] == [{"role": "user", "content": "short"}]


def test_piped_input_is_one_message() -> None:
    script, out = Script([["4", "2"]]), io.StringIO()
    converse(script, [], io.StringIO("What is\n6 x 7?\n"), out)
    assert out.getvalue() == "42\n"
    assert script.asked == [[{"role": "user", "content": "What is\n6 x 7?"}]]


def test_an_answer_cannot_drive_the_terminal() -> None:
    out = io.StringIO()
    converse(Script([["a\x1b]0;owned\x07b\tc\nd\x9b1m\r"]]), [], io.StringIO("hi"), out)
    assert out.getvalue() == "a\ufffd]0;owned\ufffdb\tc\nd\ufffd1m\ufffd\n"


@dataclass
class FakeServer:
    """Answers every chat request with ``body``; keeps what it was sent."""

    url: str = ""
    status: int = 200
    body: bytes = b""
    models: list[str] = field(default_factory=lambda: ["tiny"])
    seen: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200, json.dumps({"data": [{"id": name} for name in fake.models]}).encode())

        def do_POST(self) -> None:
            assert self.path == "/v1/chat/completions"
            fake.seen.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.answer(fake.status, fake.body)

        def answer(self, status: int, body: bytes) -> None:
            fake.keys.append(self.headers["Authorization"])
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    fake.url = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    yield fake
    http.shutdown()
    thread.join()
    http.server_close()


def events(*texts: str, end: bytes = b"data: [DONE]\n\n") -> bytes:
    chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": {"role": "assistant"}}]}]
    chunks += [{"choices": [{"index": 0, "delta": {"content": text}}]} for text in texts]
    chunks += [{"choices": [], "usage": {"completion_tokens": 3}}]
    return b": a comment\n\n" + b"".join(b"data: %b\n\n" % json.dumps(chunk).encode() for chunk in chunks) + end


def test_a_server_answers(server: FakeServer) -> None:
    server.body = events("Hé", "llo")
    remote = RemoteChat(server.url + "/v1/", None, "key", {"temperature": 0.0, "stop": ("a", "b")})
    messages = [{"role": "user", "content": "hi"}]
    assert "".join(remote.reply(messages)) == "Héllo"
    assert server.seen == [
        {"model": "tiny", "messages": messages, "stream": True, "temperature": 0.0, "stop": ["a", "b"]}
    ]
    assert server.keys == ["Bearer key", "Bearer key"]


def test_an_error_inside_a_stream_is_an_error(server: FakeServer) -> None:
    """Public failure 94 seen from this client: error events and early ends are no answers."""
    error = b'data: {"error": {"message": "the engine died"}}\n\n'
    for body, words in [
        (events("a", end=error + b"data: [DONE]\n\n"), "the engine died"),
        (events("a", end=b""), "before its end"),
    ]:
        server.body = body
        answer = RemoteChat(server.url, "tiny", None, {}).reply([])
        assert next(answer) == "a"
        with pytest.raises(OSError, match=words):
            next(answer)


def test_a_refusal_carries_the_servers_words(server: FakeServer) -> None:
    server.body = b'{"error": {"message": "max_tokens: too many"}}'
    remote = RemoteChat(server.url, "tiny", None, {})
    server.status = 400
    with pytest.raises(InvalidRequest, match="max_tokens: too many"):
        next(remote.reply([]))
    server.status = 401
    with pytest.raises(OSError, match="answered 401: max_tokens: too many"):
        next(remote.reply([]))
    server.body = b"<html>"
    server.status = 502
    with pytest.raises(OSError, match="answered 502: 502 Bad Gateway"):
        next(remote.reply([]))


def chat(*arguments: str, text: str = "hi") -> Any:
    return CliRunner().invoke(app, ["chat", *arguments], input=text)


def test_the_command_talks_to_a_server(server: FakeServer) -> None:
    server.body = events("Hello")
    result = chat("--url", server.url, "--system", "Be kind.", "--top-k", "5", "--stop", "x")
    assert (result.exit_code, result.output) == (0, "Hello\n")
    assert server.seen[0]["messages"][0] == {"role": "system", "content": "Be kind."}
    assert server.seen[0]["top_k"] == 5


@pytest.mark.parametrize(
    ("arguments", "text", "code", "words"),
    [
        ([], "hi", 2, "give a MODEL"),
        (["smollm2", "--api-key", "k"], "hi", 2, "--api-key goes with --url"),
        (["--url", "http://127.0.0.1:1", "--threads", "2"], "hi", 2, "leave out --threads"),
        (["--url", "localhost:8000"], "hi", 2, "does not start with http"),
        (["--url", "http://127.0.0.1:1", "--top-p", "7"], "hi", 2, "top_p: must be from 0 to 1"),
        (["--url", "http://127.0.0.1:1"], "hi", 1, "cannot reach http://127.0.0.1:1/v1"),
    ],
)
def test_what_cannot_work_is_one_line(arguments: list[str], text: str, code: int, words: str) -> None:
    result = chat(*arguments, text=text)
    assert result.exit_code == code
    assert words in result.output
    assert result.output.count("\n") == 1


def test_no_input_is_an_error(server: FakeServer) -> None:
    result = chat("--url", server.url, text=" \n")
    assert result.exit_code == 1
    assert "input: is empty" in result.output
