"""What a client could see at best: when requests reached this machine's socket and when replies had been written to it.

A server that looks at the clock in its own code does not see how long a request waited to be read, nor how long a write
waited to be made. So the clock is read at the system calls: the kernel says when a request arrived
(``SO_TIMESTAMPNS``), and a write is over when ``send`` has returned. That needs asyncio's own event loop, which calls
the socket's methods, and sends at once; uvloop does neither.
"""

import json
import os
import re
import socket
import struct
import time
from pathlib import Path
from typing import Any

SO_TIMESTAMPNS = 35
"""Linux; Python does not name it."""
_TIMESPEC = struct.Struct("@qq")
_TOKENS = re.compile(rb'"completion_tokens":(\d+)')
_REPLY = re.compile(rb'"id":"([\w-]+)"')
_ID = re.compile(rb"(?i)\r\nx-request-id:\s*([!-~]+)")
_END = b"0\r\n\r\n"
"""Of a reply in chunks."""


class SocketLog:
    """Writes a line of JSON for every request; ``docs/simulator.md`` says what is in it. Times are seconds of the
    monotonic clock, which all processes of a machine share; those of events count from ``arrived``.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, entry: dict[str, Any]) -> None:
        os.write(self._file, json.dumps(entry).encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)


class LoggedListener(socket.socket):
    """A bound listener whose connections are logged. Takes over the file descriptor of ``listener``."""

    def __init__(self, listener: socket.socket, log: SocketLog) -> None:
        super().__init__(fileno=listener.detach())
        self._log = log
        # Connections inherit it, so that a request that comes before its connection is accepted has a time too.
        self.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)

    def accept(self) -> tuple["LoggedSocket", Any]:
        connection, address = super().accept()
        return LoggedSocket(connection, self._log), address


class LoggedSocket(socket.socket):
    """One connection. Requests on it come one after the other."""

    def __init__(self, connection: socket.socket, log: SocketLog) -> None:
        super().__init__(fileno=connection.detach())
        self._log = log
        self._entry: dict[str, Any] | None = None
        self._tail = b""
        """End of the reply so far."""

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        data, ancillary, *_ = self.recvmsg(size, socket.CMSG_SPACE(_TIMESPEC.size), flags)
        if data and (self._entry is None or "last" in self._entry):
            self._end()
            line, _, _ = data.partition(b" HTTP/")
            found = _ID.search(data)
            self._entry = {
                "request": line[:200].decode("latin-1"),
                "id": found[1].decode() if found else None,
                "arrived": _arrival(ancillary),
                "events": [],
            }
        return data

    def send(self, data: Any, flags: int = 0, /) -> int:
        sent = super().send(data, flags)
        now = time.monotonic()
        if self._entry is not None:
            self._wrote(self._entry, bytes(data[:sent]), now)
        return sent

    def sendmsg(self, buffers: Any, /, *others: Any) -> int:
        buffers = list(buffers)
        sent = super().sendmsg(buffers, *others)
        now = time.monotonic()
        if self._entry is not None:
            self._wrote(self._entry, b"".join(buffers)[:sent], now)
        return sent

    def close(self) -> None:
        self._end()
        super().close()

    def _wrote(self, entry: dict[str, Any], data: bytes, now: float) -> None:
        if "headers" not in entry:
            if data.startswith(b"HTTP/1.1 100"):
                return
            entry["headers"] = now
        tail, self._tail = self._tail, (self._tail + data)[-4096:]
        # An event ends with two line feeds, and one may have been in the write before.
        count = data.count(b"\n\n") + (tail[-1:] == b"\n" and data[:1] == b"\n")
        begun = bool(entry["events"])
        if count or not begun:
            entry["last"] = now
            if not begun:
                entry["first"] = now
                if "reply" not in entry and (found := _REPLY.search(data)):
                    entry["reply"] = found[1].decode()
        if count:
            entry["events"].append([round(now - entry["arrived"], 6), count])
        if self._tail.endswith(_END):
            self._end()

    def _end(self) -> None:
        entry, self._entry = self._entry, None
        if entry is not None and "last" in entry:
            tokens = _TOKENS.findall(self._tail)
            self._log.write({**entry, "completion_tokens": int(tokens[-1]) if tokens else None})
        self._tail = b""


def _arrival(ancillary: list[tuple[int, int, bytes]]) -> float:
    """The kernel's time of what was just read, which is Unix time; now, where it has none."""
    now = time.monotonic()
    for level, kind, value in ancillary:
        if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS:
            seconds, nanoseconds = _TIMESPEC.unpack(value)
            return now - (time.time_ns() - seconds * 1_000_000_000 - nanoseconds) / 1e9
    return now
