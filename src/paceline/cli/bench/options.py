"""Options that the verbs of `paceline bench` share, and the targets and lists that they name."""

import shlex
from pathlib import Path
from typing import Annotated, TypeVar
from urllib.parse import urlsplit

import typer

from paceline.lab.experiment import InvalidExperiment
from paceline.lab.target import Target

ENGINE, LOAD, OUTPUT = "Engine", "Load", "Output"

Urls = Annotated[
    list[str] | None,
    typer.Option(
        "--url",
        metavar="[NAME=]URL",
        help="Of an OpenAI-compatible server, without /v1. Repeat it for several engines.",
        rich_help_panel=ENGINE,
    ),
]
Model = Annotated[str, typer.Option(help="As requests name it.", rich_help_panel=ENGINE)]
Command = Annotated[
    str | None,
    typer.Option(
        metavar="COMMAND",
        help="Starts the server at --url, and is stopped at the end. With {batch} in it the server is started for "
        "every batch size, which then is the engine's own limit.",
        rich_help_panel=ENGINE,
    ),
]
ApiKey = Annotated[
    str | None, typer.Option(envvar="OPENAI_API_KEY", show_envvar=True, help="Of the server.", rich_help_panel=ENGINE)
]
Input = Annotated[int, typer.Option(min=1, help="Tokens of a prompt.", rich_help_panel=LOAD)]
Output = Annotated[int, typer.Option(min=1, help="Tokens of a reply.", rich_help_panel=LOAD)]
TokenIds = Annotated[str, typer.Option(metavar="FROM,TO", help="Range of the random token ids.", rich_help_panel=LOAD)]
Seed = Annotated[int, typer.Option(min=0, help="Another one gives other prompts and arrivals.", rich_help_panel=LOAD)]
Slo = Annotated[
    str,
    typer.Option(
        metavar="CONSTRAINTS",
        help='For example "ttft_p99<1s, tpot_mean<20ms", or a preset: interactive, streaming, mlperf-llama3.1-8b.',
        rich_help_panel=LOAD,
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Processes that send. Not given: as many as the load needs.", rich_help_panel=LOAD),
]
Warmup = Annotated[
    int, typer.Option(min=0, help="Requests before the first stage that are not measured.", rich_help_panel=LOAD)
]
Deadline = Annotated[
    float,
    typer.Option("--deadline", metavar="SECONDS", help="Of a stage; what is open then failed.", rich_help_panel=LOAD),
]
Attainment = Annotated[
    float,
    typer.Option(min=0.01, max=1, help="Share of requests that must keep every constraint.", rich_help_panel=LOAD),
]
Json = Annotated[Path | None, typer.Option("--json", help="File for the results.", rich_help_panel=OUTPUT)]
Html = Annotated[
    Path | None, typer.Option("--html", help="File for the report, which needs no network.", rich_help_panel=OUTPUT)
]
Csv = Annotated[Path | None, typer.Option("--csv", help="File for the points as a table.", rich_help_panel=OUTPUT)]
Logs = Annotated[
    Path | None,
    typer.Option(
        "--logs", help="Folder for the raw event logs. Not given: bench-logs/NAME-TIME.", rich_help_panel=OUTPUT
    ),
]

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
        if value <= 0:
            raise InvalidExperiment(f"{name}: {part} is not above 0")
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


def targets(urls: list[str] | None, model: str, command: str | None, api_key: str | None) -> list[Target]:
    """The engines that the options name.

    Raises:
        InvalidExperiment: no URL, or one that is none, or a command for several.
    """
    if not urls:
        raise InvalidExperiment("--url is missing: which server to measure")
    if command and len(urls) > 1:
        raise InvalidExperiment("--command starts one server; write an experiment file for several")
    found = []
    for text in urls:
        name, separator, url = text.partition("=")
        if not separator or "://" in name:
            name, url = "", text
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidExperiment(f"--url: {url!r} is not like http://127.0.0.1:8000")
        url = url.rstrip("/").removesuffix("/v1")
        found.append(
            Target(
                name=name or parts.netloc,
                url=url,
                model=model,
                command=tuple(shlex.split(command)) if command else (),
                api_key=api_key,
            )
        )
    if len({target.name for target in found}) < len(found):
        raise InvalidExperiment("--url: two engines have the same name; name them: --url a=http://...")
    return found
