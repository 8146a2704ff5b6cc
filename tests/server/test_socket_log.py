"""The socket log: times at the system calls, whatever the server's own loop is doing."""

import asyncio
import json
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from paceline.server.config import ServerConfig
from paceline.server.socket_log import SO_TIMESTAMPNS, LoggedListener, SocketLog

REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-ID: abc\r\nContent-Length: 2\r\n\r\n{}"
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


@pytest.fixture(scope="module", autouse=True)
def kernel_time() -> Iterator[None]:
    """The kernel turns its time stamps on in the background, when the first socket wants them: waits until a datagram
    has the time at which it came, and not that at which it was read."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as box:
        box.bind(("127.0.0.1", 0))
        box.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        for _ in range(1000):
            box.sendto(b"x", box.getsockname())
            time.sleep(0.02)
            before_reading = time.time()
            _, [(_, _, stamp)], *_ = box.recvmsg(1, 64)
            seconds, nanoseconds = struct.unpack("@qq", stamp)
            if seconds + nanoseconds / 1e9 < before_reading:
                break
        else:
            pytest.fail("the kernel gives no time stamps")
        yield


class Speaker(asyncio.Protocol):
    """Calls ``answer`` with its transport once a whole request has come."""

    def __init__(self, answer: Callable[[asyncio.Transport], Any]) -> None:
        self._answer = answer
        self._data = b""
        self._tasks: set[Any] = set()
        self.lost = asyncio.Event()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()

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
    speaker = Speaker(answer)
    server = await asyncio.get_running_loop().create_server(lambda: speaker, sock=listener)
    client = socket.create_connection(listener.getsockname(), 5)
    try:
        client.setblocking(False)
        yield client
    finally:
        client.close()
        server.close()
        await asyncio.wait_for(speaker.lost.wait(), 10)
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


class Noted:
    """Writes, and notes between which two moments it did."""

    def __init__(self) -> None:
        self.spans: list[tuple[float, float]] = []

    def write(self, transport: asyncio.Transport, data: bytes) -> None:
        before = time.monotonic()
        transport.write(data)
        self.spans.append((before, time.monotonic()))


def within(moments: list[float], spans: list[tuple[float, float]]) -> bool:
    """Whether each moment lies in its span; the log rounds to a microsecond."""
    return all(low - 1e-6 <= at <= high + 1e-6 for at, (low, high) in zip(moments, spans, strict=True))


CLOCKS_S = 0.005
"""The kernel's time is that of another clock; between the readings of both other work may come."""


async def test_a_stream(tmp_path: Path) -> None:
    """Headers are no token, and every event has a time."""
    noted = Noted()

    async def answer(transport: asyncio.Transport) -> None:
        noted.write(transport, HEAD)
        for number in range(3):
            await asyncio.sleep(0.05)
            noted.write(transport, chunk(b'{"id":"cmpl-%d"}' % number))
        await asyncio.sleep(0.05)
        noted.write(transport, chunk(b"{}", b'{"usage":{"completion_tokens":4}}', b"[DONE]") + END)

    async with logged(tmp_path / "log", answer) as client:
        began = time.monotonic()
        await exchange(client)
        [entry] = entries(tmp_path / "log")  # Written with the end of the reply, the connection being open.
    assert entry["request"] == "POST /v1/completions"
    assert (entry["id"], entry["reply"], entry["completion_tokens"]) == ("abc", "cmpl-0", 4)
    assert [count for _, count in entry["events"]] == [1, 1, 1, 3]
    assert within([entry["arrived"] + seconds for seconds, _ in entry["events"]], noted.spans[1:])
    assert within([entry["headers"]], noted.spans[:1])
    assert began - CLOCKS_S < entry["arrived"] < entry["headers"] + CLOCKS_S
    assert entry["first"] == pytest.approx(entry["arrived"] + entry["events"][0][0], abs=1e-5)
    assert entry["last"] == pytest.approx(entry["arrived"] + entry["events"][-1][0], abs=1e-5)


async def test_the_time_in_the_accept_queue_counts(tmp_path: Path) -> None:
    """The server's loop does nothing for 0.3 s after the request came: it arrived when it came."""

    async def answer(transport: asyncio.Transport) -> None:
        transport.write(HEAD + chunk(b"{}") + END)

    async with logged(tmp_path / "log", answer) as client:
        client.send(REQUEST)
        sent = time.monotonic()
        time.sleep(0.3)  # noqa: ASYNC251
        read = time.monotonic()
        await exchange(client, request=b"")
        [entry] = entries(tmp_path / "log")
    assert entry["arrived"] < (sent + read) / 2
    assert entry["first"] >= read


async def test_a_write_is_over_when_the_socket_has_it(tmp_path: Path) -> None:
    """A client that does not read: the last bytes are written when it has made room, however early they were handed
    to the transport; the end of an event may come in a later write than its beginning."""
    many = [b"x" * 1000] * 20_000
    handed_over = asyncio.Event()

    async def answer(transport: asyncio.Transport) -> None:
        for start in range(0, len(many), 1000):
            transport.write((HEAD if start == 0 else b"") + chunk(*many[start : start + 1000]))
        transport.write(END)
        handed_over.set()

    async with logged(tmp_path / "log", answer) as client:
        client.send(REQUEST)
        await handed_over.wait()
        before = time.monotonic()
        await exchange(client, request=b"")
        [entry] = entries(tmp_path / "log")
    assert entry["first"] < before < entry["last"]
    assert sum(count for _, count in entry["events"]) == len(many)


async def test_requests_on_one_connection(tmp_path: Path) -> None:
    """Replies of known length: each ends when the next request comes, or with the connection."""
    reply = b'HTTP/1.1 200 OK\r\nContent-Length: 25\r\n\r\n{"completion_tokens":17   }'
    noted = Noted()

    async def answer(transport: asyncio.Transport) -> None:
        noted.write(transport, reply[:30])
        await asyncio.sleep(0.05)
        noted.write(transport, reply[30:])

    async with logged(tmp_path / "log", answer) as client:
        client.send(REQUEST[:20])
        half = time.monotonic()
        await asyncio.sleep(0.05)
        await exchange(client, end=b"}", request=REQUEST[20:])
        whole = time.monotonic()
        await exchange(client, end=b"}")
        assert len(entries(tmp_path / "log")) == 1
    first, second = entries(tmp_path / "log")
    for entry in (first, second):
        assert entry["events"] == []
        assert entry["completion_tokens"] == 17
    assert within([entry[name] for entry in (first, second) for name in ("headers", "last")], noted.spans)
    assert first["arrived"] < half + CLOCKS_S  # Its first part.
    assert first["headers"] > half + 0.05
    assert second["arrived"] > whole - CLOCKS_S


async def test_a_connection_without_a_reply_is_no_entry(tmp_path: Path) -> None:
    async def answer(transport: asyncio.Transport) -> None:
        transport.abort()

    async with logged(tmp_path / "log", answer) as client:
        client.send(REQUEST)
        with suppress(ConnectionResetError):
            assert await asyncio.get_running_loop().sock_recv(client, 1) == b""
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
