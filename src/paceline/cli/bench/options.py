"""Options that the verbs of `paceline bench` share, and the targets and lists that they name."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar
from urllib.parse import urlsplit

import typer

from paceline.cli.options import Group
from paceline.lab.experiment import Experiment, InvalidExperiment, SearchPlan, StagePlan, numbered, with_prompts
from paceline.lab.target import Target, server_url

ENGINE, LOAD, OUTPUT = "Engine", "Load", "Output"


@dataclass(frozen=True, kw_only=True)
class Engines:
    """The engines to measure."""

    url: Annotated[list[str] | None, typer.Option(metavar="[NAME=]URL")] = None
    """Of an OpenAI-compatible server, without /v1. Repeat it for several engines."""
    model: str | None = None
    """As requests name it. Not given: the only one that the server has."""
    command: Annotated[str | None, typer.Option(metavar="PROGRAM")] = None
    """Starts the server at --url, and is stopped at the end."""
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", show_envvar=True)] = None
    """Of the server."""

    def targets(self) -> list[Target]:
        """
        Raises:
            InvalidExperiment: no URL, or one that is none, or a command for several.
        """
        if not self.url:
            raise InvalidExperiment("--url is missing: which server to measure")
        if self.command and len(self.url) > 1:
            raise InvalidExperiment("--command starts one server; write an experiment file for several")
        found = [self._target(text) for text in self.url]
        if len({target.name for target in found}) < len(found):
            raise InvalidExperiment("--url: two engines have the same name; name them: --url a=http://...")
        return found

    def _target(self, text: str) -> Target:
        name, separator, url = text.partition("=")
        if not separator or "://" in name:
            name, url = "", text
        try:
            url = server_url(url)
        except ValueError as error:
            raise InvalidExperiment(f"--url: {error}") from error
        try:
            command = tuple(shlex.split(self.command or ""))
        except ValueError as error:
            raise InvalidExperiment(f"--command: {error}") from error
        return Target(
            name=name or urlsplit(url).netloc,
            url=url,
            model=self.model or "",
            command=command,
            api_key=self.api_key,
        )


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Of every request."""

    input: Annotated[int, typer.Option(min=1)] = 2048
    """Tokens of a prompt."""
    output: Annotated[int, typer.Option(min=1)] = 128
    """Tokens of a reply."""


@dataclass(frozen=True, kw_only=True)
class Sending:
    """How requests are made, sent and judged."""

    slo: Annotated[str, typer.Option(metavar="CONSTRAINTS")] = ""
    """For example "ttft_p99<1s, tpot_mean<20ms", or a preset: interactive, streaming, mlperf-llama3.1-8b."""
    token_ids: Annotated[str, typer.Option(metavar="FROM,TO")] = "1000,31000"
    """Range of the random token ids."""
    seed: Annotated[int, typer.Option(min=0)] = 0
    """Another one gives other prompts and arrivals."""
    deadline_s: Annotated[float | None, typer.Option("--deadline", metavar="SECONDS")] = None
    """Of a stage; what is open then failed. Not given: what only a stage takes that has come to a halt."""
    workers: Annotated[int | None, typer.Option(min=1)] = None
    """Processes that send. Not given: as many as the load needs."""
    warmup: Annotated[int, typer.Option(min=0)] = 4
    """Requests before the first stage that are not measured."""

    def stages(self, plans: Sequence[StagePlan]) -> list[StagePlan]:
        """Stages whose prompts and arrivals are drawn so."""
        return numbered(with_prompts(plans, token_range(self.token_ids), self.seed, self.deadline_s))


@dataclass(frozen=True, kw_only=True)
class Files:
    """Where the outcome goes; None: nowhere."""

    json: Path | None = None
    """File for the results."""
    html: Path | None = None
    """File for the report, which needs no network."""
    csv: Path | None = None
    """File for the points as a table."""
    logs: Path | None = None
    """Folder for the raw event logs. Not given: bench-logs/NAME-TIME."""

    @property
    def written(self) -> tuple[Path | None, ...]:
        """All but the logs."""
        return self.json, self.html, self.csv


EnginesOptions = Annotated[Engines, Group(Engines(), ENGINE)]
BatchEnginesOptions = Annotated[
    Engines,
    Group(
        Engines(),
        ENGINE,
        more={
            "command": "With {batch} in it the server is started for every batch size, which then is the engine's own "
            "limit."
        },
    ),
]
LengthsOptions = Annotated[Lengths, Group(Lengths(), LOAD)]
FilesOptions = Annotated[Files, Group(Files(), OUTPUT)]
ReportOptions = Annotated[Files, Group(Files(), OUTPUT, leave_out=("logs",))]
"""Without logs: of verbs that write none."""
Attainment = Annotated[
    float,
    typer.Option(min=0.01, max=1, help="Share of requests that must keep every constraint.", rich_help_panel=LOAD),
]


def experiment(
    name: str, engines: Engines, stages: Sequence[StagePlan], sending: Sending, search: SearchPlan | None = None
) -> Experiment:
    """
    Raises:
        InvalidExperiment: an option is out of its range.
    """
    return Experiment(
        name=name,
        targets=engines.targets(),
        stages=sending.stages(stages),
        slo=sending.slo,
        search=search,
        workers=sending.workers,
        warmup=sending.warmup,
    )


Number = TypeVar("Number", int, float)


def numbers(text: str, kind: type[Number], name: str) -> list[Number]:
    """Reads ``1,2,4``.

    Raises:
        InvalidExperiment: something in it is no positive number of this kind.
    """
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        try:
            value = kind(part)
        except ValueError as error:
            raise InvalidExperiment(f"{name}: {part!r} is no number") from error
        if not 0 < value < math.inf:
            raise InvalidExperiment(f"{name}: {part} is not above 0, or not finite")
        found.append(value)
    if not found:
        raise InvalidExperiment(f"{name}: names nothing")
    return found


def token_range(text: str) -> list[int]:
    """Reads ``1000,31000``."""
    found = numbers(text, int, "--token-ids")
    if len(found) != 2 or found[0] >= found[1]:
        raise InvalidExperiment("--token-ids: must be two numbers, the second larger: 1000,31000")
    return found
