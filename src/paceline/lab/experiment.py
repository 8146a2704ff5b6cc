"""What to measure: targets, stages and constraints, from flags or from a TOML file."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from paceline.lab.target import Target


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
    deadline_s: float = 3600.0
    ignore_eos: bool = True
    sampling: dict[str, Any] = field(default_factory=lambda: {"temperature": 0})


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


def with_prompts(
    stages: Sequence[StagePlan], token_ids: Sequence[int], seed: int, deadline_s: float
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
        data = tomllib.loads(path.read_text())
    except OSError as error:
        raise InvalidExperiment(f"{path}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise InvalidExperiment(f"{path}: {error}") from error
    known = {"name", "slo", "workers", "warmup", "targets", "stages", "throughput", "batch", "rate", "search"}
    if unknown := set(data) - known:
        raise InvalidExperiment(
            f"{path}: unknown key {', '.join(sorted(unknown))}; known are {', '.join(sorted(known))}"
        )
    stages = [_make(StagePlan, entry, "stages") for entry in data.get("stages", [])]
    for key, make in (("throughput", throughput_stages), ("batch", batch_stages), ("rate", rate_stages)):
        if key in data:
            try:
                stages += make(**data[key])
            except TypeError as error:
                raise InvalidExperiment(f"{path}: [{key}]: {error}") from error
    search = _make(SearchPlan, data["search"], "search") if "search" in data else None
    targets = [_make(Target, entry, "targets") for entry in data.get("targets", [])]
    if not targets:
        raise InvalidExperiment(f"{path}: names no [[targets]]")
    if not stages:
        raise InvalidExperiment(f"{path}: names no [[stages]], [throughput], [batch] or [rate]")
    return Experiment(
        name=data.get("name", path.stem),
        targets=targets,
        stages=stages,
        slo=data.get("slo", ""),
        search=search,
        workers=data.get("workers"),
        warmup=data.get("warmup", 4),
    )


def _make(kind: Any, entry: Mapping[str, Any], where: str) -> Any:
    names = {item.name for item in fields(kind)}
    if unknown := set(entry) - names:
        raise InvalidExperiment(
            f"[{where}]: unknown key {', '.join(sorted(unknown))}; known are {', '.join(sorted(names))}"
        )
    values = {key: tuple(value) if key == "command" else value for key, value in entry.items()}
    try:
        return kind(**values)
    except TypeError as error:
        raise InvalidExperiment(f"[{where}]: {error}") from error
