"""`paceline recommend`: a choice of engine from results."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.errors import bad_values

if TYPE_CHECKING:
    from paceline.advisor.candidate import Candidate
    from paceline.advisor.prices import Hardware
    from paceline.advisor.recommend import Recommendation


def recommend(
    results: Annotated[list[Path], typer.Argument(metavar="RESULTS", help="Files that `bench --json` wrote.")],
    price: Annotated[
        Path, typer.Option(metavar="FILE", help="TOML file of prices by GPU; examples/prices.toml is one.")
    ],
    slo: Annotated[
        str,
        typer.Option(
            metavar="TEXT", help="Constraints, or a preset's name. Default: those that the results were made for."
        ),
    ] = "",
    load: Annotated[
        float | None, typer.Option(metavar="RPS", help="Requests/s to be served; counts the GPUs for it.")
    ] = None,
    headroom: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of each replica's goodput that stays free.")
    ] = 0.2,
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[ENGINE=]COUNTxGPU",
            help="What a replica ran on, like vllm=2xH200, or 1xH200 for all engines. Repeat it for several. "
            "Default: what the results name, else one of the GPU that has a price, if only one has.",
        ),
    ] = None,
    workload: Annotated[
        str | None, typer.Option(metavar="NAME", help="By which to judge, where the results have several.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", metavar=" ", help="Print JSON instead of tables.")] = False,
) -> None:
    """Choose an engine: what each takes under the constraints, the GPUs for a load, the cost, why the others lost."""
    # Imported late: numpy takes time that --help should not.
    import msgspec

    from paceline.advisor.prices import read_prices
    from paceline.advisor.recommend import recommend as choose
    from paceline.lab.results import read_results
    from paceline.lab.slo import parse_constraints

    with bad_values():
        found = choose(
            [read_results(path) for path in results],
            read_prices(price),
            parse_constraints(slo),
            load,
            headroom=headroom,
            hardware=_hardware(gpu or []),
            workload=workload,
        )
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        _print(found)
    if found.choice is None:
        raise typer.Exit(1)


def _hardware(texts: list[str]) -> dict[str, "Hardware"]:
    from paceline.advisor.prices import Hardware

    found = {}
    for text in texts:
        engine, _, machine = text.rpartition("=")
        found[engine] = Hardware.parse(machine)
    return found


def _print(found: "Recommendation") -> None:
    from paceline.cli.tables import readable_table, terminal
    from paceline.lab.report.text import number

    def cell(value: float | None) -> str:
        return "-" if value is None else number(value)

    console = terminal(140)
    numbers = [f"keeps\n{found.load_unit}", "breaks at", "goodput\nrequests/s"]
    if found.target_load is not None:
        numbers += ["GPUs", f"{found.currency}\nan hour"]
    numbers.append(f"{found.currency} a million\noutput tokens")
    table = readable_table(console, ("", "engine", "a replica"), numbers)
    for rank, item in enumerate(found.candidates, 1):
        row = [str(rank) if item.qualified else "-", item.engine, str(item.hardware)]
        row += [cell(item.highest_load), cell(item.broken_load), cell(item.goodput_rps)]
        if found.target_load is not None:
            row += ["-" if item.gpus is None else str(item.gpus), cell(item.cost_per_hour)]
        row.append(cell(item.cost_per_million_tokens))
        table.add_row(*row, style="bold" if item is found.choice else None)
    console.print(table)
    console.print(_assumptions(found), markup=False, highlight=False, style="dim")
    console.print(_choice(found, found.choice), markup=False, highlight=False)
    for item in found.candidates:
        if item.lost:
            console.print(f"{item.engine}: {item.lost}", markup=False, highlight=False)
    for caution in found.cautions:
        console.print(f"Caution: {caution}", markup=False, highlight=False, style="yellow")


def _choice(found: "Recommendation", choice: "Candidate | None") -> str:
    from paceline.lab.report.text import number

    limits = ", ".join(found.constraints)
    if choice is None:
        return f"No choice: no engine is known to keep {limits} at a known price."
    cost = f"{number(choice.cost_per_million_tokens)} {found.currency} a million output tokens"
    if found.target_load is None:
        return f"Choice: {choice.engine} keeps {limits} at {cost}."
    replicas = "replica" if choice.replicas == 1 else "replicas"
    load = f"{number(found.target_load)} requests/s on {choice.replicas} {replicas} of {choice.hardware}"
    return f"Choice: {choice.engine} keeps {limits} at {load}, {cost}."


def _assumptions(found: "Recommendation") -> str:
    text = f"Constraints: {', '.join(found.constraints)}. Replicas run at {1 - found.headroom:.0%} of their goodput"
    return text + (", in whole numbers." if found.target_load is not None else ".")
