"""A server whose pace is known: token k of a reply is due ``ttft + k * tpot`` seconds after its request came.

It replays bytes that are made beforehand, and stamps every write once it has returned, which is the truth that a meter
is held against. One thread, plain sockets. A request's first prompt token is its number in the truth.

    python benchmarks/paced_server.py --core 0 --ttft 0.12 --tpot 0.015 --truth FILE

prints its port and serves until its standard input ends; then it writes the truth: JSON, number -> [when the request
was read, when each token was written], seconds by the monotonic clock.
"""

import argparse
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from pathlib import Path

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
clock = time.monotonic


def sse(value: object) -> bytes:
    data = b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


def head() -> dict[str, object]:
    return {"id": "cmpl-0123456789abcdef0123", "object": "text_completion", "created": 1796000000, "model": "paced"}


def token_chunk(finish: str | None) -> bytes:
    choice = {"index": 0, "text": " word", "logprobs": None, "finish_reason": finish, "stop_reason": None}
    return sse({**head(), "choices": [choice], "usage": None})


def usage_chunk(tokens: int) -> bytes:
    usage = {"prompt_tokens": 8, "completion_tokens": tokens, "total_tokens": 8 + tokens}
    return sse({**head(), "choices": [], "usage": usage}) + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


TOKEN, LAST = token_chunk(None), token_chunk("length")


class Reply:
    """One that is under way."""

    def __init__(self, sock: socket.socket, number: int, tokens: int, first: float, read: float) -> None:
        self.sock = sock
        self.number = number
        self.tokens = tokens
        self.first = first
        self.written = 0
        self.times = [read]


class PacedServer:
    def __init__(self, ttft: float, tpot: float) -> None:
        self._ttft, self._tpot = ttft, tpot
        self.truth: dict[int, list[float]] = {}
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._sockets: dict[int, socket.socket] = {}
        self._partial: dict[int, bytes] = {}
        self._due: list[tuple[float, int, Reply]] = []
        self._count = 0

    def serve(self) -> None:
        epoll = select.epoll()
        epoll.register(self._listener, select.EPOLLIN)
        epoll.register(0, select.EPOLLIN)
        due = self._due
        while True:
            now = clock()
            for _ in range(64):
                if not due or due[0][0] > now:
                    break
                self._write(heappop(due)[2])
            events = epoll.poll(0, 64)
            for fd, _ in events:
                if fd == 0:
                    return
                if fd == self._listener.fileno():
                    sock, _ = self._listener.accept()
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    self._sockets[sock.fileno()] = sock
                    epoll.register(sock, select.EPOLLIN)
                else:
                    self._read(fd, epoll)
            if not events:
                wait = due[0][0] - clock() if due else 1.0
                if wait > 0:
                    select.select([epoll], [], [], wait)

    def _read(self, fd: int, epoll: select.epoll) -> None:
        sock = self._sockets[fd]
        try:
            data = sock.recv(1 << 20)
        except ConnectionError:
            data = b""
        if not data:
            epoll.unregister(sock)
            del self._sockets[fd]
            sock.close()
            return
        read = clock()
        data = self._partial.pop(fd, b"") + data
        head, _, body = data.partition(b"\r\n\r\n")
        at = head.lower().find(b"content-length: ")
        if at < 0 or len(body) < int(head[at + 16 :].split(b"\r\n")[0]):
            self._partial[fd] = data
            return
        request = json.loads(body)
        self._count += 1
        first = read + self._ttft
        reply = Reply(sock, request["prompt"][0], request["max_tokens"], first, read)
        heappush(self._due, (first, self._count, reply))

    def _write(self, reply: Reply) -> None:
        reply.written += 1
        last = reply.written == reply.tokens
        data = LAST + usage_chunk(reply.tokens) if last else TOKEN
        try:
            # A socket that is full would make the server wait: its time is the truth all the same.
            reply.sock.sendall(HEAD + data if reply.written == 1 else data)
        except OSError:
            return  # The client has left.
        reply.times.append(clock())
        if last:
            self.truth[reply.number] = reply.times
        else:
            heappush(self._due, (reply.first + reply.written * self._tpot, reply.number, reply))


@contextmanager
def paced_server(core: int, ttft: float, tpot: float, truth: Path) -> Iterator[str]:
    """URL of a running server; ``truth`` is there once the context is left."""
    command = [sys.executable, __file__, "--core", core, "--ttft", ttft, "--tpot", tpot, "--truth", truth]
    with subprocess.Popen([*map(str, command)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.stdin.close()
            process.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--core", type=int, required=True)
    parser.add_argument("--ttft", type=float, required=True)
    parser.add_argument("--tpot", type=float, required=True)
    parser.add_argument("--truth", type=Path, required=True)
    options = parser.parse_args()
    os.sched_setaffinity(0, {options.core})
    server = PacedServer(options.ttft, options.tpot)
    print(server.port, flush=True)
    server.serve()
    options.truth.write_text(json.dumps(server.truth))


if __name__ == "__main__":
    main()
