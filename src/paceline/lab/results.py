"""The results document: what ``--json`` writes and reports read. ``docs/lab.md`` describes it field by field."""

import csv
import io
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import msgspec

from paceline.lab.gpu_watch import Gpus
from paceline.lab.point import SCHEMA_VERSION, Point, Statistics
from paceline.lab.search import SearchResult
from paceline.lab.target import Target


class InvalidResults(ValueError):
    """A file that is no results document, or of a version that this one does not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTarget:
    """An engine, as far as it may be told to others: no key, and no environment."""

    name: str
    url: str
    model: str
    command: list[str] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)
    """What it says of itself: version, limits."""
    gpus: list[Gpus] = field(default_factory=list)
    """Seen at work while it was measured; empty where none was, and where it runs on another machine."""

    @classmethod
    def of(cls, target: Target, info: dict[str, Any] | None = None) -> "MeasuredTarget":
        return cls(name=target.name, url=target.url, model=target.model, command=list(target.command), info=info or {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """All that one experiment measured."""

    schema_version: int = SCHEMA_VERSION
    experiment: str
    started_at: str
    """UTC, ISO 8601."""
    targets: list[MeasuredTarget]
    machine: dict[str, Any] = field(default_factory=dict)
    """Of the client."""
    commands: list[str] = field(default_factory=list)
    """That measured it, and those that start the engines."""
    constraints: list[str] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    """In the order of measurement; `Point.target` names the engine."""
    searches: list[SearchResult] = field(default_factory=list)
    interrupted: bool = False
    """By its user, before its last stage. An engine that failed is in `failures`."""
    failures: list[str] = field(default_factory=list)
    """What kept engines from being measured to their end; each starts with the engine's name and a colon."""

    def with_model(self, target: str, model: str) -> "Results":
        """These results, where the named target serves ``model``."""
        targets = [replace(item, model=model) if item.name == target else item for item in self.targets]
        return replace(self, targets=targets)

    def with_gpus(self, target: str, gpus: list[Gpus]) -> "Results":
        """These results, where the named target has ``gpus`` if they are more than it had."""
        count = sum(each.count for each in gpus)
        targets = [
            replace(item, gpus=gpus) if item.name == target and count > sum(each.count for each in item.gpus) else item
            for item in self.targets
        ]
        return replace(self, targets=targets)


def to_json(results: Results) -> str:
    """One JSON object, indented. Values that were not measured are ``null``."""
    return msgspec.json.format(msgspec.json.encode(results), indent=2).decode() + "\n"


def from_json(text: str | bytes) -> Results:
    """Reads what `to_json` wrote; fields that it does not know are ignored.

    Raises:
        InvalidResults: no results document, or of another version.
    """
    try:
        version = msgspec.json.decode(text, type=_Version).schema_version
        if version != SCHEMA_VERSION:
            raise InvalidResults(f"results of schema version {version}; this paceline reads {SCHEMA_VERSION}")
        return msgspec.json.decode(text, type=Results)
    except msgspec.MsgspecError as error:
        raise InvalidResults(f"no results document: {error}") from error


def read_results(path: Path) -> Results:
    """As `from_json`; the message of an error names the file.

    Raises:
        InvalidResults: no such file, or as `from_json`.
    """
    try:
        return from_json(path.read_bytes())
    except OSError as error:
        raise InvalidResults(f"{path}: {error.strerror}") from error
    except InvalidResults as error:
        raise InvalidResults(f"{path}: {error}") from error


_STATISTICS = [item.name for item in fields(Point) if item.type is Statistics]
_PLAIN = (
    "target", "name", "offered_rate", "achieved_rate", "batch", "batch_kind", "valid", "window_s", "prompt_tokens",
    "output_tokens", "output_tokens_per_s", "requests_per_s", "goodput_rps", "attainment",
)  # fmt: skip


def to_csv(results: Results) -> str:
    """The points as a table, one row each. Values that were not measured are empty, and times are seconds."""
    rows = [_row(point) for point in results.points]
    out = io.StringIO()
    names = [*_PLAIN, "sent", "ok", "failed"]
    names += [f"{metric}_{item.name}" for metric in _STATISTICS for item in fields(Statistics)]
    writer = csv.DictWriter(out, [*names, "attainment_low", "attainment_high", "reasons", "notes"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _row(point: Point) -> dict[str, Any]:
    row: dict[str, Any] = {name: getattr(point, name) for name in _PLAIN}
    row |= {"sent": point.requests.sent, "ok": point.requests.ok, "failed": point.requests.failed}
    for metric in _STATISTICS:
        row |= {f"{metric}_{item.name}": getattr(getattr(point, metric), item.name) for item in fields(Statistics)}
    row["attainment_low"], row["attainment_high"] = point.attainment_interval or (None, None)
    return row | {"reasons": "; ".join(point.reasons), "notes": "; ".join(point.notes)}


@dataclass(frozen=True, slots=True)
class _Version:
    schema_version: int
