"""A server that answers each prompt by a script, byte by byte: what real servers do wrong, and at which moment."""

import asyncio
import json
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

HANG = "hang"
CLOSE = "close"
RESET = "reset"
Step = bytes | float | str
"""Bytes to send, seconds to wait, or `HANG`, `CLOSE`, `RESET`."""
Script = Iterable[Step]
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
CHUNKED = SSE + b"transfer-encoding: chunked\r\n\r\n"
UNTIL_CLOSED = SSE + b"connection: close\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(value: Any, end: bytes = b"\n\n") -> bytes:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return b"data: " + text.encode() + end


def token(text: str = "a", *, usage: int | None = None, finish: str | None = None) -> dict[str, Any]:
    """A chunk of a completion, with continuous usage if it is given."""
    value: dict[str, Any] = {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}
    return value if usage is None else {**value, "usage": usage_of(usage)}


def delta(**fields: Any) -> dict[str, Any]:
    """A chunk of a chat completion."""
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def usage_of(tokens: int) -> dict[str, Any]:
    return {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": 5 + tokens}


def usage_chunk(tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": usage_of(tokens)}


def stream(*events: Any, gap: float = 0.0) -> list[Step]:
    """A good chunked reply of these events, `gap` seconds between them. Its end comes in one piece with ``[DONE]``."""
    steps: list[Step] = [CHUNKED]
    for each in events:
        steps += [gap, chunk(event(each))]
    return [*steps, chunk(event("[DONE]")) + END]


def tokens(count: int, gap: float = 0.0) -> list[Step]:
    """A good reply with the usage at its end."""
    parts = [token(finish="length" if i == count - 1 else None) for i in range(count)]
    return stream(*parts, usage_chunk(count), gap=gap)


def whole(status: str, body: Any, *fields: str) -> list[Step]:
    """A reply with a length."""
    data = json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status}", "content-type: application/json", f"content-length: {len(data)}", *fields]
    return ["\r\n".join([*lines, "", ""]).encode() + data]


@dataclass
class Arrival:
    time: float
    """By the monotonic clock."""
    connection: int
    path: str
    fields: dict[str, str]
    body: dict[str, Any]
    writes: list[float] = field(default_factory=list)
    """When each part of the reply was about to be written."""

    @property
    def prompt(self) -> str:
        """What selects the script: the text, or that of the last message; of token ids the first."""
        if "messages" in self.body:
            return self.body["messages"][-1]["content"]
        prompt = self.body["prompt"]
        return str(prompt[0]) if isinstance(prompt, list) else prompt


@dataclass
class ScriptedServer:
    """Answers `script(arrival)`."""

    script: Callable[[Arrival], Script]
    url: str = ""
    arrivals: list[Arrival] = field(default_factory=list)
    connections: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection, self.connections = self.connections, self.connections + 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                fields = dict(line.lower().split(": ", 1) for line in head[1:] if line)
                body = json.loads(await reader.readexactly(int(fields["content-length"])))
                arrival = Arrival(time.monotonic(), connection, head[0].split()[1], fields, body)
                self.arrivals.append(arrival)
                for step in self.script(arrival):
                    if isinstance(step, bytes):
                        arrival.writes.append(time.monotonic())
                        writer.write(step)
                        await writer.drain()
                    elif isinstance(step, float):
                        await asyncio.sleep(step)
                    elif step == HANG:
                        await reader.read()
                        return
                    else:
                        if step == RESET:
                            linger = struct.pack("ii", 1, 0)
                            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                        return
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # The client has left.
        finally:
            writer.close()


@contextmanager
def scripted_server(
    script: Callable[[Arrival], Script] | dict[str, Script] | None = None, *, tls: ssl.SSLContext | None = None
) -> Iterator[ScriptedServer]:
    """A running server. Of a dict, the prompt selects; what it lacks, as the client's probe, gets a good reply."""

    def of_prompt(arrival: Arrival) -> Script:
        table = script if isinstance(script, dict) else {}
        return table[arrival.prompt] if arrival.prompt in table else tokens(arrival.body["max_tokens"])

    server = ScriptedServer(script if callable(script) else of_prompt)
    loop = asyncio.new_event_loop()
    started = threading.Event()

    async def run() -> None:
        listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls, backlog=4096)
        name, port = ("localhost", listener.sockets[0].getsockname()[1])
        server.url = f"{'https' if tls else 'http'}://{name}:{port}"
        started.set()
        await stopped.wait()
        listener.close()
        everyone = asyncio.all_tasks() - {asyncio.current_task()}
        for task in everyone:
            task.cancel()
        await asyncio.gather(*everyone, return_exceptions=True)

    stopped = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    started.wait()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join()
        loop.close()
