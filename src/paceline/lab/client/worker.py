"""A process that sends requests when they are due and logs what comes back. Started by `paceline.lab.client.run`.

One loop over epoll and plain sockets. What arrives costs a receive, a look at the chunk sizes (to know where the reply
ends) and an entry in a buffer; JSON is read after the stage. Waiting is by `select` on the epoll itself, as epoll's own
timeout counts whole milliseconds.
"""

import contextlib
import gc
import io
import os
import resource
import select
import signal
import ssl
import sys
import time
from collections import defaultdict
from heapq import heapify, heappop, heappush
from pathlib import Path

import msgspec

from paceline.lab.client.connection import Connection
from paceline.lab.client.http_reply import InvalidReply
from paceline.lab.client.log import DUE, Entry, EntryWriter
from paceline.lab.client.plan import COUNTERS, LENGTH, START, Counters, Item, Plan
from paceline.lab.client.self_knowledge import SelfKnowledge
from paceline.lab.client.turns import Turns

EVENTS = 64
"""Most sockets that are read, and requests that are sent, before the loop looks at the clock again."""
EARLY_S = 0.0002
"""A sleep ends up to this much late; the last part of a wait for a send looks at the clock instead."""
AHEAD_S = 0.1
"""Requests due so soon after the start find a connection."""
CONNECT_S = 5.0
"""Longest wait before the start for connections."""
FLUSH_S = 0.25
"""What a killed worker loses at most."""
LINGER_S = 0.01
"""So long after ``[DONE]`` a reply whose body does not end gives its seat free. Not at once: most servers end the body
right after, and its connection can then carry the next request."""

DATA = int(Entry.DATA)
clock = time.monotonic


class Worker:
    """Carries out a plan. ``control`` is readable when the worker shall stop; ``news`` takes `Counters`."""

    def __init__(self, plan: Plan, control: int, news: int) -> None:
        self._plan = plan
        self._items = {item.id: item for item in plan.items}
        self._control = control
        self._news = news
        self._log = EntryWriter(Path(plan.log))
        self._tls = ssl.create_default_context() if plan.address.tls is not None else None
        self._ready = [(item.due, item.id) for item in plan.items if item.after is None]
        """Requests that wait for their time only: a heap."""
        heapify(self._ready)
        self._followers: dict[int, list[Item]] = defaultdict(list)
        for item in plan.items:
            if item.after is not None:
                self._followers[item.after].append(item)
        self._open = set(self._items)
        """Requests that have not ended."""
        self._payloads: dict[int, tuple[float, bytes]] = {}
        """(due, bytes) of those on their way to a socket."""
        self._turns = Turns(plan.items, plan.maker)
        self._connections: dict[int, Connection] = {}
        self._idle: dict[int, Connection] = {}
        """By file, the last used one at the end."""
        self._epoll = select.epoll()
        self._epoll.register(control, select.EPOLLIN)
        self._lingering: dict[int, float] = {}
        """Replies that others wait for, and when their ``[DONE]`` came; in that order. Their bodies have not ended."""
        self._sent: set[int] = set()
        self._failed = 0
        self._start = 0.0

    def connect(self) -> None:
        """Opens connections for the requests that are due at the start, so that a burst is one of requests. What
        cannot be opened now is tried again, and reported, when its request is sent."""
        for _ in range(sum(due < AHEAD_S for due, _ in self._ready)):
            try:
                connection = Connection(self._plan.address, self._tls)
            except OSError:
                break
            self._connections[connection.fd] = connection
            self._epoll.register(connection.fd, connection.wants)
        limit = clock() + CONNECT_S
        while len(self._idle) < len(self._connections) and clock() < limit:
            for fd, mask in self._epoll.poll(0.1):
                if fd == self._control:
                    return  # The parent has gone.
                if fd in self._connections:
                    self._handle(self._connections[fd], mask)
        for connection in list(self._connections.values()):
            if not connection.ready:
                self._drop(connection)

    def run(self, start: float) -> None:
        """From ``start`` (by the monotonic clock) until all requests have ended, the deadline, or a stop."""
        self._start = start
        self._knowledge = knowledge = SelfKnowledge(start)
        deadline = start + self._plan.deadline_s
        ready, epoll = self._ready, self._epoll
        flush_at = start
        while self._open:
            now = clock()
            if now >= knowledge.next_tick:
                knowledge.tick(now)
                self._free_seats(now)
                if now >= flush_at:
                    flush_at = now + FLUSH_S
                    self._log.flush()
                    self._tell()
            if now >= deadline:
                self._cancel(now)
                break
            for _ in range(EVENTS):
                if not ready or start + ready[0][0] > now:
                    break
                self._begin(*heappop(ready))
            events = epoll.poll(0, EVENTS)
            if events:
                for fd, mask in events:
                    if fd == self._control:
                        self._open.clear()
                        break
                    if fd in self._connections:
                        self._handle(self._connections[fd], mask)
                continue
            wake = min(knowledge.next_tick, deadline)
            if ready:
                wake = min(wake, start + ready[0][0] - EARLY_S)
            wait = wake - clock()
            if wait > 0:
                select.select([epoll], [], [], wait)
        self._log.flush()
        self._log.json(b"W", knowledge.summary(clock()))
        self._log.close()
        self._tell()

    def _begin(self, due: float, id: int) -> None:
        """A request's time has come."""
        self._payloads[id] = due, self._turns.payload(self._items[id], due)
        if self._idle:
            _, connection = self._idle.popitem()
            self._send(connection, id)
        else:
            self._connect(id)

    def _connect(self, id: int) -> None:
        self._entry(clock(), id, Entry.CONNECTING, DUE.pack(self._payloads[id][0]))
        try:
            connection = Connection(self._plan.address, self._tls, id)
        except OSError as error:
            self._fail(id, clock(), _words(error))
            return
        self._connections[connection.fd] = connection
        self._epoll.register(connection.fd, connection.wants)

    def _send(self, connection: Connection, id: int) -> None:
        due, payload = self._payloads[id]
        before = connection.wants
        now = clock()
        try:
            connection.send(id, payload)
        except OSError as error:
            self._lost(connection, now, error)
            return
        self._entry(now, id, Entry.SENT, DUE.pack(due))
        self._sent.add(id)
        if connection.wants != before:
            self._epoll.modify(connection.fd, connection.wants)

    def _handle(self, connection: Connection, mask: int) -> None:
        try:
            if not connection.ready:
                self._advance(connection)
                return
            if mask & select.EPOLLOUT:
                connection.push()
                if connection.wants == select.EPOLLIN:
                    self._epoll.modify(connection.fd, select.EPOLLIN)
            data = connection.receive()
        except OSError as error:
            self._lost(connection, clock(), error)
            return
        now = clock()
        if data is None:
            return
        id = connection.request
        if id is None or not data:
            self._lost(connection, now, None)
            return
        knowledge = self._knowledge
        knowledge.chunks += 1
        knowledge.bytes += len(data)
        self._entry(now, id, DATA, data)
        self._turns.feed(id, now - self._start, data)
        reply = connection.reply
        try:
            body = reply.feed(data)
        except InvalidReply as error:
            self._drop(connection)
            self._fail(id, now, str(error))
            return
        if reply.complete:
            self._failed += reply.status != 200
            if reply.reusable and connection.wants == select.EPOLLIN:
                connection.request = None
                connection.reused = True
                self._idle[connection.fd] = connection
            else:
                self._drop(connection)
            self._end(id, now)
        elif id in self._followers and connection.is_done(body):
            self._lingering.setdefault(id, now)

    def _advance(self, connection: Connection) -> None:
        before = connection.wants
        connection.advance()
        if connection.ready and connection.request is None:
            connection.wants = select.EPOLLIN
            self._idle[connection.fd] = connection
        if connection.wants != before:
            self._epoll.modify(connection.fd, connection.wants)
        if connection.ready and connection.request is not None:
            self._send(connection, connection.request)

    def _lost(self, connection: Connection, now: float, error: OSError | None) -> None:
        """The server closed a connection, or it broke."""
        self._drop(connection)
        id = connection.request
        if id is None:
            self._idle.pop(connection.fd, None)
        elif connection.reused and connection.reply.untouched:
            self._connect(id)  # It was closed for its idleness just when it was used again: HTTP allows to repeat.
        elif error is not None:
            self._fail(id, now, _words(error))
        else:
            self._entry(now, id, Entry.CLOSED, b"")
            connection.reply.end()
            self._failed += not connection.reply.complete or connection.reply.status != 200
            self._turns.closed(id, now - self._start)
            self._end(id, now)

    def _drop(self, connection: Connection) -> None:
        self._epoll.unregister(connection.fd)
        connection.sock.close()
        del self._connections[connection.fd]

    def _fail(self, id: int, now: float, error: str) -> None:
        self._entry(now, id, Entry.FAILED, error.encode())
        self._failed += 1
        self._turns.failed(id, error)
        self._end(id, now)

    def _end(self, id: int, now: float) -> None:
        self._open.discard(id)
        self._payloads.pop(id, None)
        self._release(id, now)

    def _free_seats(self, now: float) -> None:
        """Of replies that are complete for any reader, though their bodies are kept open."""
        for id in [id for id, done in self._lingering.items() if now - done >= LINGER_S]:
            self._release(id, now)

    def _release(self, id: int, now: float) -> None:
        """Those that wait for it."""
        self._lingering.pop(id, None)
        followers = self._followers.pop(id, ())
        answered = bool(followers) and self._turns.answered(id)
        for follower in followers:
            if follower.payload or answered:
                heappush(self._ready, (now - self._start + follower.due, follower.id))
            else:
                self._fail(follower.id, now, f"the reply that it needs, of request {id}, failed")

    def _cancel(self, now: float) -> None:
        """The deadline has come: nothing is waited for any more."""
        seconds = f"the deadline of {self._plan.deadline_s:g} s"
        connecting = {connection.request for connection in self._connections.values()} - self._sent
        for id in sorted(self._open):
            error = f"cancelled at {seconds}" if id in self._sent else f"not sent before {seconds}"
            if id in connecting:
                error = f"the server accepted no connection before {seconds}"
            self._entry(now, id, Entry.FAILED, error.encode())
        self._failed += len(self._open)
        self._open.clear()
        for connection in list(self._connections.values()):
            self._drop(connection)

    def _entry(self, now: float, id: int, kind: int, payload: bytes) -> None:
        self._log.entry(now - self._start, id, kind, payload)

    def _tell(self) -> None:
        counters = Counters(len(self._sent), len(self._items) - len(self._open), self._failed)
        with contextlib.suppress(BrokenPipeError):  # The parent has gone, which ``control`` tells.
            os.write(self._news, COUNTERS.pack(*counters))


def _words(error: OSError) -> str:
    return f"connection failed: {error.strerror or error}"


def main() -> None:
    """Reads the plan, says that it is ready, reads the start, works. It stops when its standard input says anything
    more, or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Of the terminal; the parent decides.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with open(0, "rb", buffering=0, closefd=False) as control:
        plan = msgspec.msgpack.decode(_exactly(control, *LENGTH.unpack(_exactly(control, LENGTH.size))), type=Plan)
        worker = Worker(plan, control.fileno(), 1)
        worker.connect()
        gc.collect()
        gc.freeze()
        gc.disable()
        os.write(1, COUNTERS.pack(*Counters()))
        (start,) = START.unpack(_exactly(control, START.size))
        worker.run(start)


def _exactly(file: io.RawIOBase, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = file.read(size - len(data))
        if not part:
            sys.exit(1)
        data += part
    return bytes(data)


if __name__ == "__main__":
    main()
