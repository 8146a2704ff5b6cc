"""The raw event log of a stage: every arrival with its time, so that all figures can be computed again.

The file starts with ``MAGIC``. Frames follow: one byte of kind, four bytes of length (little endian), the payload.

====  ============================================================================================================
kind  payload
====  ============================================================================================================
H     JSON: the stage without prompts, the target without its key, machine, command, start, what the server takes
A     entries, one after another: ``<d`` seconds from the start, ``<I`` request, ``<B`` kind, ``<I`` length, payload
Z     the same, compressed by zlib
S     ``<d``: the start, by the monotonic clock of the client's machine
W     JSON: what one worker knows of itself
F     JSON: the end. A log without it was interrupted
====  ============================================================================================================

Kinds of entries: ``CONNECTING`` (a connection is opened for it; payload ``<d``: when it was due), ``SENT`` (its first
byte is handed to the socket now; the same payload), ``DATA`` (bytes as the socket gave them), ``CLOSED`` (by the
server), ``FAILED`` (payload: why). A file that ends inside a frame is read up to there. Workers append whole frames to
the one file while the stage runs.
"""

import os
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from pathlib import Path
from struct import Struct
from typing import Any

import msgspec

from paceline.lab.client.plan import START
from paceline.lab.client.reply_parser import ReplyParser
from paceline.lab.client.self_knowledge import percentiles
from paceline.lab.record import RequestRecord
from paceline.lab.stage import PlannedRequest, Stage
from paceline.lab.target import Target

MAGIC = b"paceline log 1\n"
FRAME = Struct("<cI")
ENTRY = Struct("<dIBI")
DUE = Struct("<d")
FLUSH_BYTES = 1 << 18


class Entry(IntEnum):
    SENT = 0
    DATA = 1
    CLOSED = 2
    FAILED = 3
    CONNECTING = 4


class InvalidLog(ValueError):
    """A file that is no log, or of another version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLog:
    """One stage as it went."""

    stage: Stage
    """Its requests have no prompts."""
    target: Target
    """Without its key."""
    started_at: str
    """UTC, ISO 8601."""
    records: list[RequestRecord]
    """One a planned request, in their order."""
    client: dict[str, float]
    """Of the client itself: ``workers``; ``cpu`` (of the busiest worker in its busiest second, 1 = a core);
    ``lateness_p50_s``, ``_p99_s``, ``_p999_s``, ``_max_s`` (begun - due); ``loop_delay_p50_s`` and so on (how long a
    worker took to look at its sockets, sampled every few milliseconds, of the worst worker); ``bytes`` and ``chunks``
    (receives), ``chunks_per_s``. What a killed worker could not write is missing."""
    interrupted: bool
    machine: dict[str, Any]
    """Of the client."""
    command: str
    options: dict[str, Any] = field(default_factory=dict)
    """What was asked of the server: ``usage`` (``continuous``, ``final`` or ``none``) and ``ignore_eos``."""
    clock_start: float | None = None
    """The start by the monotonic clock of the client's machine: places the log beside one of a server there. None:
    interrupted before."""


class LogWriter:
    """Appends frames. Several processes may write to one file, each frame with one call."""

    def __init__(self, path: Path, *, new: bool = False) -> None:
        flags = os.O_WRONLY | os.O_APPEND | (os.O_CREAT | os.O_TRUNC if new else 0)
        self._file = os.open(path, flags, 0o644)
        if new:
            os.write(self._file, MAGIC)

    def frame(self, kind: bytes, *parts: bytes) -> None:
        payload = b"".join(parts)
        data = memoryview(FRAME.pack(kind, len(payload)) + payload)
        while data:  # A second round only on a disk that is full or nearly so.
            data = data[os.write(self._file, data) :]

    def json(self, kind: bytes, value: Any) -> None:
        self.frame(kind, msgspec.json.encode(value))

    def close(self) -> None:
        os.close(self._file)


class EntryWriter(LogWriter):
    """Gathers entries and appends them as one frame when they are many, or at a `flush`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._entries: list[bytes] = []
        self._bytes = 0

    def entry(self, time: float, request: int, kind: int, payload: bytes) -> None:
        """``time``: seconds from the start."""
        self._entries += (ENTRY.pack(time, request, kind, len(payload)), payload)
        self._bytes += len(payload)
        if self._bytes > FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._entries:
            self.frame(b"A", *self._entries)
            self._entries.clear()
            self._bytes = 0


def header(stage: Stage, target: Target, **more: Any) -> dict[str, Any]:
    """Payload of the H frame."""
    requests = [
        {name: getattr(request, name) for name in request.__slots__ if name != "prompt"} for request in stage.requests
    ]
    values = {name: getattr(stage, name) for name in stage.__slots__ if name != "requests"}
    return {
        "stage": {**values, "requests": requests},
        "target": {**asdict(target), "api_key": None, "env": dict.fromkeys(target.env, "")},
        **more,
    }


def frames(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """(kind, payload) of all whole frames. Raises `InvalidLog`."""
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise InvalidLog(f"{path} is not a log of this version")
        while len(head := file.read(FRAME.size)) == FRAME.size:
            kind, length = FRAME.unpack(head)
            payload = file.read(length)
            if len(payload) < length:
                return
            yield kind, payload


def entries(path: Path) -> Iterator[tuple[float, int, int, bytes]]:
    """(seconds, request, kind, payload) of all arrivals; those of one request in their order."""
    for kind, payload in frames(path):
        if kind == b"Z":
            payload = zlib.decompress(payload)
        elif kind != b"A":
            continue
        at = 0
        while at < len(payload):
            time, request, entry, length = ENTRY.unpack_from(payload, at)
            at += ENTRY.size + length
            yield time, request, entry, payload[at - length : at]


def compress(path: Path) -> None:
    """Makes the log small: streams of JSON shrink about tenfold."""
    small = path.with_name(path.name + ".tmp")
    writer = LogWriter(small, new=True)
    try:
        for kind, payload in frames(path):
            if kind == b"A":
                writer.frame(b"Z", zlib.compress(payload, 1))
            else:
                writer.frame(kind, payload)
        os.replace(small, path)
    finally:
        writer.close()
        small.unlink(missing_ok=True)


def read_log(path: Path, *, keep_text: bool = False) -> StageLog:
    """Reads a log and parses its replies.

    Raises:
        InvalidLog: it is none, or it ends before its header does.
    """
    head: dict[str, Any] | None = None
    footer: dict[str, Any] | None = None
    clock_start: float | None = None
    workers: list[dict[str, float]] = []
    for kind, payload in frames(path):
        if kind == b"H":
            head = msgspec.json.decode(payload)
        elif kind == b"S":
            (clock_start,) = START.unpack(payload)
        elif kind == b"W":
            workers.append(msgspec.json.decode(payload))
        elif kind == b"F":
            footer = msgspec.json.decode(payload)
    if head is None:
        raise InvalidLog(f"{path} ends before its header does")
    requests = [PlannedRequest(prompt=[], **request) for request in head["stage"].pop("requests")]
    stage = Stage(requests=requests, **head["stage"])
    interrupted = footer is None or footer["interrupted"]
    records = _records(path, stage, interrupted, keep_text)
    return StageLog(
        stage=stage,
        target=msgspec.convert(head["target"], Target),
        started_at=head["started_at"],
        records=records,
        client=_client(records, workers),
        interrupted=interrupted,
        machine=head["machine"],
        command=head["command"],
        options=head["options"],
        clock_start=clock_start,
    )


def _records(path: Path, stage: Stage, interrupted: bool, keep_text: bool) -> list[RequestRecord]:
    parsers: dict[int, ReplyParser] = {}
    for request in stage.requests:
        # One that waits for another is due when that one has ended: if it never was, not before the deadline.
        due = request.due if request.after is None else stage.deadline_s
        record = RequestRecord(request.id, due, expected_tokens=request.output_tokens if stage.ignore_eos else None)
        parsers[request.id] = ReplyParser(record, keep_text=keep_text)
    for time, id, kind, payload in entries(path):
        parser = parsers[id]
        if kind == Entry.DATA:
            parser.feed(time, payload)
        elif kind == Entry.SENT:
            if parser.record.sent is None:  # Else it is repeated on another connection.
                parser.record.sent = time
                (parser.record.due,) = DUE.unpack(payload)
        elif kind == Entry.CONNECTING:
            if parser.record.begun is None:
                parser.record.connecting = time
                (parser.record.due,) = DUE.unpack(payload)
        elif kind == Entry.CLOSED:
            parser.closed(time)
        elif parser.record.error is None:
            parser.record.error = payload.decode()
    records = []
    for parser in parsers.values():
        record = parser.record
        if record.ended is None and record.error is None:
            before = "the end" if not interrupted else "the log breaks off"
            record.error = f"not {'sent' if record.sent is None else 'answered'} before {before}"
        records.append(parser.finish())
    return records


def _client(records: list[RequestRecord], workers: list[dict[str, float]]) -> dict[str, float]:
    late = sorted(record.begun - record.due for record in records if record.begun is not None)
    found = percentiles("lateness", late)
    if workers:
        found["workers"] = len(workers)
        for name in workers[0]:
            values = [worker[name] for worker in workers]
            found[name] = sum(values) if name in ("bytes", "chunks") else max(values)
        times = [time for record in records for time in (record.sent, record.last or record.ended) if time is not None]
        if times and max(times) > min(times):
            found["chunks_per_s"] = found["chunks"] / (max(times) - min(times))
    return found
