"""What to measure: targets, stages and constraints, from flags or from a TOML file."""

import math
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from paceline.lab.target import Target, server_url


class InvalidExperiment(ValueError):
    """An experiment that cannot be carried out; the message names the key."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A stage before its requests are made."""

    name: str
    workload: dict[str, Any]
    """As `workload_from` reads it: ``{"kind": "fixed", "input": 2048, "output": 128, "requests": 512}``."""
    load: dict[str, Any]
    """``{"kind": "burst"}``, ``{"kind": "concurrency", "batch": 8}``, ``{"kind": "trace"}``, or what
    `lab.workload.arrivals_from` reads: ``{"kind": "poisson", "rate": 3.0}``."""
    deadline_s: float | None = None
    """Of the stage, after which what is open has failed; None: by its load, see `lab.run.deadline_of`."""
    ignore_eos: bool = True
    sampling: dict[str, Any] = field(default_factory=lambda: {"temperature": 0})

    def __post_init__(self) -> None:
        if self.deadline_s is not None and not 0 < self.deadline_s < math.inf:
            raise InvalidExperiment(f"deadline: must be a number of seconds above 0, not {self.deadline_s:g}")


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """Looks for the highest load that keeps the constraints."""

    over: str
    """``rate``: Poisson arrivals; ``batch``: requests kept open."""
    low: float
    high: float
    attainment: float = 0.99
    """Share of the requests that must keep every constraint."""
    tolerance: float = 0.05
    """How close the answer is to the edge, as a share of it."""

    def __post_init__(self) -> None:
        if self.over not in ("rate", "batch"):
            raise InvalidExperiment(f"search: over must be rate or batch, not {self.over!r}")
        if not 0 < self.low <= self.high < math.inf:
            raise InvalidExperiment(f"search: {self.low:g} to {self.high:g} is no range of loads; it starts above 0")
        if self.over == "batch" and not (float(self.low).is_integer() and float(self.high).is_integer()):
            raise InvalidExperiment("search: a batch is a whole number")
        if not 0 < self.attainment <= 1:
            raise InvalidExperiment(f"search: attainment must be above 0 and at most 1, not {self.attainment:g}")
        if not 0 < self.tolerance < 1:
            raise InvalidExperiment(f"search: tolerance must be between 0 and 1, not {self.tolerance:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One or several engines under the same stages."""

    name: str
    targets: list[Target]
    stages: list[StagePlan]
    slo: str = ""
    """Constraints, or the name of a preset; see `lab.slo`."""
    search: SearchPlan | None = None
    workers: int | None = None
    """Processes that send; None: as many as the load needs."""
    warmup: int = 4
    """Requests sent to an engine before its first stage; they are not measured."""

    def __post_init__(self) -> None:
        """
        Raises:
            InvalidExperiment: nothing can be measured so, or two things would have one name.
        """
        for what, names in (("engines", [target.name for target in self.targets]), ("stages", self.stage_names)):
            if twice := [name for name, count in Counter(names).items() if count > 1]:
                raise InvalidExperiment(f"two {what} have the same name, {twice[0]!r}: give them names of their own")
        if self.workers is not None and self.workers < 1:
            raise InvalidExperiment(f"workers: must be at least 1, not {self.workers}")
        if self.warmup < 0:
            raise InvalidExperiment(f"warmup: must be at least 0, not {self.warmup}")
        if self.search is not None and not self.slo:
            raise InvalidExperiment("slo is missing: a search looks for the highest load that keeps constraints")
        open_loop = any(stage.load.get("kind") != "concurrency" for stage in self.stages)
        by_rate = self.search is not None and self.search.over == "rate"
        if (open_loop or by_rate) and any("{batch}" in part for target in self.targets for part in target.command):
            raise InvalidExperiment("command: {batch} stands for the requests at once, which only closed loops have")

    @property
    def stage_names(self) -> list[str]:
        return [stage.name for stage in self.stages]


SHAPES = ((128, 128), (2048, 128), (128, 2048), (2048, 2048))
"""Input and output lengths of the field's classic comparison."""


def throughput_stages(shapes: Sequence[tuple[int, int]] = SHAPES, requests: int = 4096) -> list[StagePlan]:
    """Bursts: all requests at once."""
    return [StagePlan(f"{i}x{o}", fixed(i, o, requests), {"kind": "burst"}) for i, o in shapes]


def batch_stages(batches: Sequence[int], input: int, output: int, requests: int | None = None) -> list[StagePlan]:
    """So many requests at once, at least four rounds of each."""
    return [
        StagePlan(
            f"batch={batch}",
            fixed(input, output, requests or max(16, 4 * batch)),
            {"kind": "concurrency", "batch": batch},
        )
        for batch in batches
    ]


def rate_stages(rates: Sequence[float], input: int, output: int, requests: int) -> list[StagePlan]:
    """Poisson arrivals at each rate, requests a second."""
    return [
        StagePlan(f"rate={rate:g}", fixed(input, output, requests), {"kind": "poisson", "rate": rate}) for rate in rates
    ]


def fixed(input: int, output: int, requests: int) -> dict[str, Any]:
    return {"kind": "fixed", "input": input, "output": output, "requests": requests}


def read_shapes(text: str) -> list[tuple[int, int]]:
    """Reads ``128x128,2048x128``.

    Raises:
        InvalidExperiment: it is not like that.
    """
    try:
        shapes = [(int(i), int(o)) for i, o in (part.split("x") for part in text.split(","))]
    except ValueError as error:
        raise InvalidExperiment(f"shapes: {text!r} is not like 128x128,2048x128") from error
    if any(i < 1 or o < 1 for i, o in shapes):
        raise InvalidExperiment("shapes: lengths must be at least 1")
    return shapes


def numbered(stages: Sequence[StagePlan]) -> list[StagePlan]:
    """A stage that comes again is a repeat: ``rate=3 #2``, with other arrivals."""
    seen: Counter[str] = Counter()
    found = []
    for stage in stages:
        seen[stage.name] += 1
        if (count := seen[stage.name]) > 1:
            stage = replace(stage, name=f"{stage.name} #{count}")
            if stage.load.get("kind") in ("poisson", "gamma"):
                stage = replace(stage, load={**stage.load, "seed": stage.load.get("seed", 0) + count - 1})
        found.append(stage)
    return found


def with_prompts(
    stages: Sequence[StagePlan], token_ids: Sequence[int], seed: int, deadline_s: float | None
) -> list[StagePlan]:
    """Stages whose prompts and arrivals are drawn so."""
    return [
        replace(
            stage,
            workload={**stage.workload, "token_ids": list(token_ids), "seed": seed},
            load={**stage.load, "seed": seed} if stage.load["kind"] in ("poisson", "gamma") else stage.load,
            deadline_s=deadline_s,
        )
        for stage in stages
    ]


def read_experiment(path: Path) -> Experiment:
    """Reads an experiment file.

    ``[[targets]]`` are fields of `Target`, ``[[stages]]`` of `StagePlan`. Instead of stages, ``[throughput]``,
    ``[batch]`` or ``[rate]`` have the arguments of the functions of those names: ``[rate]`` with ``rates``, ``input``,
    ``output``, ``requests``. ``[search]`` has the fields of `SearchPlan`.

    Raises:
        InvalidExperiment: no such file, no TOML, or a key that is missing, unknown or of a wrong type.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidExperiment(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidExperiment(f"{path}: {error}") from error
    try:
        return _experiment(data, path.stem)
    except InvalidExperiment as error:
        raise InvalidExperiment(f"{path}: {error}") from error


_TABLES: dict[str, Callable[..., list[StagePlan]]] = {
    "throughput": throughput_stages,
    "batch": batch_stages,
    "rate": rate_stages,
}


def _experiment(data: dict[str, Any], name: str) -> Experiment:
    plain = {"name": str, "slo": str, "workers": int, "warmup": int}
    known = {*plain, "targets", "stages", "search", *_TABLES}
    _no_others(data, known, "")
    given = {key: _value(data[key], kind, key) for key, kind in plain.items() if key in data}
    stages: list[StagePlan] = [_make(StagePlan, entry, "stages") for entry in _list(data, "stages")]
    for key, make in _TABLES.items():
        if key in data:
            stages += _make(make, data[key], key)
    targets = [_make(Target, entry, "targets") for entry in _list(data, "targets")]
    if not targets:
        raise InvalidExperiment("names no [[targets]]")
    if not stages:
        raise InvalidExperiment("names no [[stages]], [throughput], [batch] or [rate]")
    try:
        targets = [replace(target, url=server_url(target.url)) for target in targets]
    except ValueError as error:
        raise InvalidExperiment(f"[targets]: url: {error}") from error
    return Experiment(
        **{"name": name, **given},
        targets=targets,
        stages=numbered(stages),
        search=_make(SearchPlan, data["search"], "search") if "search" in data else None,
    )


def _list(data: Mapping[str, Any], key: str) -> list[Any]:
    entries: list[Any] = _value(data.get(key, []), list[dict[str, Any]], key)
    return entries


def _make(make: Any, table: Any, where: str) -> Any:
    """Calls a dataclass or a function with the keys of a table."""
    hints = get_type_hints(make)
    hints.pop("return", None)
    _value(table, dict[str, Any], f"[{where}]")
    _no_others(table, set(hints), f"[{where}]: ")
    values = {key: _value(value, hints[key], f"[{where}]: {key}") for key, value in table.items()}
    needed = [name for name, item in signature(make).parameters.items() if item.default is Parameter.empty]
    if missing := [name for name in needed if name not in values]:
        raise InvalidExperiment(f"[{where}]: {', '.join(missing)} missing")
    return make(**values)


def _no_others(table: Mapping[str, Any], known: set[str], where: str) -> None:
    if unknown := set(table) - known:
        raise InvalidExperiment(
            f"{where}unknown key {', '.join(sorted(unknown))}; known are {', '.join(sorted(known))}"
        )


def _value(value: Any, kind: Any, where: str) -> Any:
    """The value as this type."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise InvalidExperiment(f"{where}: {error}") from error
