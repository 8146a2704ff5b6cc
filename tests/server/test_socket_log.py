"""The socket log: times at the system calls, whatever the server's own loop is doing."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline.server.config import ServerConfig
from paceline.server.socket_log import LoggedListener, SocketLog

REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-ID: abc\r\nContent-Length: 2\r\n\r\n{}"
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


class Speaker(asyncio.Protocol):
    """Calls ``answer`` with its transport once a whole request has come."""

    def __init__(self, answer: Callable[[asyncio.Transport], Any]) -> None:
        self._answer = answer
        self._data = b""
        self._tasks: set[Any] = set()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        if self._data.endswith(b"{}"):
            self._data = b""
            self._tasks.add(asyncio.ensure_future(self._answer(self._transport)))


@asynccontextmanager
async def logged(path: Path, answer: Callable[[asyncio.Transport], Any]) -> AsyncIterator[socket.socket]:
    """A connection to a server whose sockets are logged."""
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    log = SocketLog(path)
    listener = LoggedListener(bound, log)
    await asyncio.sleep(0.2)  # The kernel turns its time stamps on in the background.
    server = await asyncio.get_running_loop().create_server(lambda: Speaker(answer), sock=listener)
    client = socket.create_connection(listener.getsockname(), 5)
    try:
        client.setblocking(False)
        yield client
    finally:
        client.close()
        server.close()
        await asyncio.sleep(0.05)
        log.close()


def chunk(*events: bytes) -> bytes:
    data = b"".join(b"data: %b\n\n" % event for event in events)
    return b"%x\r\n%b\r\n" % (len(data), data)


async def exchange(client: socket.socket, end: bytes = END, request: bytes = REQUEST) -> None:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(client, request)
    reply = b""
    while not reply.endswith(end):
        reply += await loop.sock_recv(client, 1 << 20)


def entries(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_a_stream(tmp_path: Path) -> None:
    """Headers are no token, and every event has a time."""

    async def answer(transport: asyncio.Transport) -> None:
        transport.write(HEAD)
        for number in range(3):
            await asyncio.sleep(0.05)
            transport.write(chunk(b'{"id":"cmpl-%d"}' % number))
        await asyncio.sleep(0.05)
        transport.write(chunk(b"{}", b'{"usage":{"completion_tokens":4}}', b"[DONE]") + END)

    async with logged(tmp_path / "log", answer) as client:
        began = time.monotonic()
        await exchange(client)
        [entry] = entries(tmp_path / "log")  # Written with the end of the reply, the connection being open.
    assert (entry["request"], entry["id"], entry["completion_tokens"]) == ("POST /v1/completions", "abc", 4)
    assert entry["reply"] == "cmpl-0"
    assert [count for _, count in entry["events"]] == [1, 1, 1, 3]
    assert [seconds for seconds, _ in entry["events"]] == pytest.approx([0.05, 0.1, 0.15, 0.2], abs=0.03)
    assert entry["arrived"] == pytest.approx(began, abs=0.02)
    assert entry["headers"] < entry["first"] == pytest.approx(entry["arrived"] + entry["events"][0][0], abs=1e-5)
    assert entry["last"] == pytest.approx(entry["arrived"] + entry["events"][-1][0], abs=1e-5)


async def test_the_time_in_the_accept_queue_counts(tmp_path: Path) -> None:
    """The server's loop does nothing for 0.3 s after the request came: it arrived when it came."""

    async def answer(transport: asyncio.Transport) -> None:
        transport.write(HEAD + chunk(b"{}") + END)

    async with logged(tmp_path / "log", answer) as client:
        sent = time.monotonic()
        client.send(REQUEST)
        time.sleep(0.3)  # noqa: ASYNC251
        read = time.monotonic()
        await asyncio.sleep(0.1)
        [entry] = entries(tmp_path / "log")
    assert entry["arrived"] - sent < 0.05
    assert entry["first"] >= read


async def test_a_write_is_over_when_the_socket_has_it(tmp_path: Path) -> None:
    """A client that does not read: the last bytes are written when it has made room, however early they were handed
    to the transport; the end of an event may come in a later write than its beginning."""
    many = [b"x" * 1000] * 20_000

    async def answer(transport: asyncio.Transport) -> None:
        for start in range(0, len(many), 1000):
            transport.write((HEAD if start == 0 else b"") + chunk(*many[start : start + 1000]))
        transport.write(END)

    async with logged(tmp_path / "log", answer) as client:
        client.send(REQUEST)
        await asyncio.sleep(0.4)
        before = time.monotonic()
        await exchange(client, request=b"")
        [entry] = entries(tmp_path / "log")
    assert entry["first"] < before < entry["last"]
    assert sum(count for _, count in entry["events"]) == len(many)


async def test_requests_on_one_connection(tmp_path: Path) -> None:
    """Replies of known length: each ends when the next request comes, or with the connection."""
    reply = b'HTTP/1.1 200 OK\r\nContent-Length: 25\r\n\r\n{"completion_tokens":17   }'

    async def answer(transport: asyncio.Transport) -> None:
        transport.write(reply[:30])
        await asyncio.sleep(0.05)
        transport.write(reply[30:])

    async with logged(tmp_path / "log", answer) as client:
        for half in (REQUEST[:20], REQUEST):
            if half is not REQUEST:
                client.send(half)
                await asyncio.sleep(0.05)
            await exchange(client, end=b"}", request=REQUEST[20:] if half is not REQUEST else REQUEST)
        assert len(entries(tmp_path / "log")) == 1
    first, second = entries(tmp_path / "log")
    for entry in (first, second):
        assert entry["events"] == []
        assert entry["completion_tokens"] == 17
        assert entry["last"] - entry["headers"] == pytest.approx(0.05, abs=0.03)
    assert first["headers"] - first["arrived"] > 0.04  # From its first part.
    assert second["headers"] - second["arrived"] < 0.04


async def test_a_connection_without_a_reply_is_no_entry(tmp_path: Path) -> None:
    async def answer(transport: asyncio.Transport) -> None:
        transport.abort()

    async with logged(tmp_path / "log", answer) as client:
        client.send(REQUEST)
        await asyncio.sleep(0.05)
    assert entries(tmp_path / "log") == []


def test_goes_with_one_process() -> None:
    assert ServerConfig(socket_log="log", api_processes=1).socket_log == "log"
    with pytest.raises(ValueError, match="socket_log: goes with api_processes=1, not 2"):
        ServerConfig(socket_log="log", api_processes=2)


def test_appends(tmp_path: Path) -> None:
    for number in range(2):
        log = SocketLog(tmp_path / "log")
        log.write({"number": number})
        log.close()
    assert [entry["number"] for entry in entries(tmp_path / "log")] == [0, 1]
