"""Arrivals and lengths that public services recorded.

| kind | file | time | blocks |
|---|---|---|---|
| ``azure`` | Azure LLM inference traces of 2023 and 2024, CSV | date and time, seven digits | none |
| ``burstgpt`` | BurstGPT, CSV | seconds | none |
| ``mooncake`` | Mooncake (FAST'25), JSONL | milliseconds, in ticks of some 3 s: see `jitter` | of 512 tokens |
| ``bailian`` | Qwen-Bailian, JSONL | seconds | of 16 tokens; chats name the one before |
"""

import csv
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from paceline.lab.workload.generator import generator
from paceline.lab.workload.invalid import InvalidWorkload


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One recorded request."""

    time_s: float
    """Arrival, in seconds from the first row's."""
    input_tokens: int
    output_tokens: int
    """0 where the recorded service failed (BurstGPT)."""
    blocks: tuple[int, ...] = ()
    """The prompt as hashes of its blocks: equal ids are equal tokens, after equal blocks."""
    block_tokens: int = 0
    """Tokens a block; 0 without blocks."""
    chat: str | None = None
    """Id by which the next turn names this one as its parent."""
    parent: str | None = None
    """``chat`` of the turn before."""


def read_trace(path: Path, kind: str | None = None) -> list[TraceRow]:
    """Reads a trace; rows come in order of time, and the first is at 0 s.

    Args:
        kind: ``azure``, ``burstgpt``, ``mooncake`` or ``bailian``; None: told from the first line.

    Raises:
        InvalidWorkload: names the file, the line and what is wrong with it.
    """
    try:
        kind = kind or _guess(path)
        if kind not in KINDS:
            raise InvalidWorkload(f"{path}: no trace kind is named {kind!r}; these are: {', '.join(KINDS)}")
        rows = KINDS[kind](path)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidWorkload(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if not rows:
        raise InvalidWorkload(f"{path}: holds no requests")
    rows.sort(key=lambda row: row.time_s)
    return _shifted(rows, rows[0].time_s)


def scale(rows: Sequence[TraceRow], rate: float) -> list[TraceRow]:
    """The same requests ``rate`` times as fast: 2 doubles the request rate."""
    if not (rate > 0 and math.isfinite(rate)):
        raise InvalidWorkload(f"scale: must be above 0, not {rate}")
    return [replace(row, time_s=row.time_s / rate) for row in rows]


def slice(
    rows: Sequence[TraceRow],
    *,
    start_s: float = 0.0,
    end_s: float | None = None,
    first: int = 0,
    count: int | None = None,
) -> list[TraceRow]:
    """The rows of ``start_s <= time < end_s``, of these at most ``count`` from number ``first`` on.

    Times count from ``start_s``, or with ``first`` from the first row that is left. What remains may be nothing.
    """
    kept = [row for row in rows if start_s <= row.time_s and (end_s is None or row.time_s < end_s)]
    kept = kept[first : None if count is None else first + count]
    return _shifted(kept, kept[0].time_s if first and kept else start_s)


def jitter(rows: Sequence[TraceRow], seed: int = 0, tick_s: float | None = None) -> list[TraceRow]:
    """Spreads the requests of each tick evenly at random over it, in their order.

    Where a service recorded coarse times, a replay without this sends what came over a whole tick in one moment.

    Args:
        tick_s: width of a tick; None: the median distance of distinct times. No request gets past the next recorded
            time.
    """
    times = sorted({row.time_s for row in rows})
    if tick_s is None:
        tick_s = statistics.median(b - a for a, b in pairwise(times)) if len(times) > 1 else 0.0
    ends = {a: min(a + tick_s, b) for a, b in pairwise([*times, math.inf])}
    rng = generator(seed, "jitter")
    spread = []
    for time, group in groupby(rows, key=lambda row: row.time_s):
        tick = list(group)
        offsets = sorted((rng.random(len(tick)) * (ends[time] - time)).tolist())
        spread += [replace(row, time_s=round(time + by, 9)) for row, by in zip(tick, offsets, strict=True)]
    return spread


def shorter(rows: Sequence[TraceRow], max_tokens: int) -> list[TraceRow]:
    """Without the requests whose input and output together are longer, which an engine would refuse."""
    return [row for row in rows if row.input_tokens + max(1, row.output_tokens) <= max_tokens]


def _shifted(rows: Sequence[TraceRow], start_s: float) -> list[TraceRow]:
    return [replace(row, time_s=row.time_s - start_s) for row in rows]


def _guess(path: Path) -> str:
    with path.open(encoding="utf-8-sig") as file:
        line = file.readline()
    for sign, kind in (("ContextTokens", "azure"), ("Request tokens", "burstgpt"), ("parent_chat_id", "bailian")):
        if sign in line:
            return kind
    if "hash_ids" in line:
        return "mooncake"
    raise InvalidWorkload(f"{path}:1: not the start of a known trace; these are: {', '.join(KINDS)}")


def _azure(path: Path) -> list[TraceRow]:
    rows, start_ns = [], None
    for where, row in _csv(path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens")):
        now_ns = _nanoseconds(row["TIMESTAMP"], where)
        start_ns = now_ns if start_ns is None else start_ns  # a double has no room for a date's nanoseconds
        seconds = (now_ns - start_ns) / 1e9
        rows.append(TraceRow(seconds, _whole(row, "ContextTokens", where), _whole(row, "GeneratedTokens", where)))
    return rows


def _burstgpt(path: Path) -> list[TraceRow]:
    return [
        TraceRow(
            _number(row, "Timestamp", where),
            _whole(row, "Request tokens", where),
            _whole(row, "Response tokens", where),
        )
        for where, row in _csv(path, ("Timestamp", "Request tokens", "Response tokens"))
    ]


def _mooncake(path: Path) -> list[TraceRow]:
    return [
        TraceRow(
            _number(row, "timestamp", where) / 1000,
            _whole(row, "input_length", where),
            _whole(row, "output_length", where),
            _blocks(row, where),
            512,
        )
        for where, row in _jsonl(path)
    ]


def _bailian(path: Path) -> list[TraceRow]:
    rows = []
    for where, row in _jsonl(path):
        chat, parent = (_value(row, key, where) for key in ("chat_id", "parent_chat_id"))
        rows.append(
            TraceRow(
                _number(row, "timestamp", where),
                _whole(row, "input_length", where),
                _whole(row, "output_length", where),
                _blocks(row, where),
                16,
                chat=str(chat),
                parent=None if parent in (-1, None) else str(parent),
            )
        )
    return rows


KINDS: dict[str, Callable[[Path], list[TraceRow]]] = {
    "azure": _azure,
    "burstgpt": _burstgpt,
    "mooncake": _mooncake,
    "bailian": _bailian,
}


def _csv(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        missing = [column for column in columns if column not in (reader.fieldnames or ())]
        if missing:
            raise InvalidWorkload(f"{path}:1: has no column {', '.join(missing)}")
        for row in reader:
            yield f"{path}:{reader.line_num}", row


def _jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise InvalidWorkload(f"{where}: no JSON: {error.msg}") from error
            if not isinstance(row, dict):
                raise InvalidWorkload(f"{where}: must be an object")
            yield where, row


def _value(row: dict[str, Any], key: str, where: str) -> Any:
    if key not in row:
        raise InvalidWorkload(f"{where}: has no {key}")
    return row[key]


def _number(row: dict[str, Any], key: str, where: str) -> float:
    value = _value(row, key, where)
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise InvalidWorkload(f"{where}: {key} must be a number, not {value!r}")
    return number


def _whole(row: dict[str, Any], key: str, where: str) -> int:
    number = _number(row, key, where)
    if number < 0 or not number.is_integer():
        raise InvalidWorkload(f"{where}: {key} must be a whole number of at least 0, not {row[key]!r}")
    return int(number)


def _blocks(row: dict[str, Any], where: str) -> tuple[int, ...]:
    blocks = _value(row, "hash_ids", where)
    if not isinstance(blocks, list) or not all(isinstance(block, int) for block in blocks):
        raise InvalidWorkload(f"{where}: hash_ids must be a list of whole numbers")
    return tuple(blocks)


def _nanoseconds(text: str | None, where: str) -> int:
    """Of ``2023-11-16 18:17:03.9799600``, with any number of digits and, in 2024's files, with a zone at the end."""
    try:
        seconds, _, rest = (text or "").partition(".")
        digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
        moment = datetime.fromisoformat(seconds + rest[len(digits) :])
    except ValueError as error:
        raise InvalidWorkload(f"{where}: TIMESTAMP must be a date and time, not {text!r}") from error
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return int(moment.timestamp()) * 10**9 + int(digits[:9].ljust(9, "0"))
