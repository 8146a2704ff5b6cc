"""`paceline simulate`: a trace through the engine's own scheduler, in virtual time."""

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.errors import bad_values, fail, failures
from paceline.simulator.gpu_model import GpuModel
from paceline.simulator.simulate import Outcome, Routing, SimulatedRequest, trace_prompt
from paceline.simulator.simulate import simulate as run

if TYPE_CHECKING:
    from paceline.lab.point import Point, Statistics
    from paceline.lab.stage import Stage
    from paceline.lab.workload.traces import TraceRow

METRICS = ("ttft", "tpot", "itl", "e2e")
STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")


def simulate(
    trace: Annotated[Path, typer.Argument(help="Azure, Mooncake, BurstGPT or Bailian trace.")],
    gpu_model: Annotated[
        str, typer.Option(help="JSON file of a step-time model, or the name of one that comes with paceline.")
    ],
    slo: Annotated[str, typer.Option(help='Constraints, such as "ttft_p99<1s, tpot_mean<20ms", or a preset.')] = "",
    replicas: Annotated[int, typer.Option(min=1, help="Engines that share the load.")] = 1,
    routing: Annotated[Routing, typer.Option(help="Which engine gets a request.")] = "least_loaded",
    scale: Annotated[float, typer.Option(help="Replay so many times as fast: 2 doubles the request rate.")] = 1.0,
    requests: Annotated[int | None, typer.Option(min=1, help="Only the first so many requests.")] = None,
    jitter: Annotated[bool, typer.Option("--jitter", help="Spread requests inside the trace's coarse ticks.")] = False,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Instead of the model's.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(min=1, help="Instead of the model's.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the results document (docs/lab.md) there.")] = None,
) -> None:
    """Serve TRACE on a simulated GPU, and report goodput and latencies."""
    from paceline.lab.command_line import command_line
    from paceline.lab.measure import measure
    from paceline.lab.results import MeasuredTarget, Results, to_json
    from paceline.lab.simulated import simulated_log
    from paceline.lab.slo import parse_constraints
    from paceline.lab.workload import traces

    with bad_values():
        constraints = parse_constraints(slo)
        model = GpuModel.load(gpu_model)
        sizes = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
        given = {name: size for name, size in sizes.items() if size is not None}
        model = replace(model, engine=replace(model.engine, **given))
        rows = traces.slice(traces.read_trace(trace), count=requests)
        rows = traces.scale(traces.jitter(rows) if jitter else rows, scale)
    if not rows:
        raise fail(f"{trace}: no requests are left", code=2)
    stage = _stage(trace.stem, rows, {"replicas": replicas, "routing": routing, "scale": scale})
    planned = [
        SimulatedRequest(
            request.due,
            trace_prompt(request.id, request.prompt_tokens or 1, row.blocks, row.block_tokens),
            request.output_tokens,
        )
        for request, row in zip(stage.requests, rows, strict=True)
    ]
    outcomes = _run(planned, model, replicas, routing, prefix_cache=any(row.blocks for row in rows))
    log = simulated_log(stage, outcomes, model, command_line())
    point = measure(log, constraints)
    typer.echo(_report(point, model, replicas))
    if json is not None:
        results = Results(
            experiment="simulate",
            started_at=log.started_at,
            targets=[MeasuredTarget.of(log.target)],
            commands=[log.command],
            constraints=[constraint.text for constraint in constraints],
            points=[point],
        )
        with failures():
            json.write_text(to_json(results), encoding="utf-8")


def _run(
    planned: list[SimulatedRequest], model: GpuModel, replicas: int, routing: Routing, *, prefix_cache: bool
) -> list[Outcome]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("Simulating", total=len(planned))
        return run(
            planned,
            model,
            replicas=replicas,
            routing=routing,
            prefix_cache=prefix_cache,
            on_progress=lambda ended: progress.update(task, completed=ended),
        )


def _stage(name: str, rows: "list[TraceRow]", load: dict[str, object]) -> "Stage":
    from paceline.lab.stage import PlannedRequest, Stage

    span = rows[-1].time_s
    return Stage(
        name=name,
        requests=[
            PlannedRequest(index, row.time_s, [], max(1, row.output_tokens), max(1, row.input_tokens))
            for index, row in enumerate(rows)
        ],
        load={"kind": "trace", **load},
        deadline_s=math.inf,
        offered_rate=(len(rows) - 1) / span if span > 0 else None,
    )


def _report(point: "Point", model: GpuModel, replicas: int) -> str:
    engines = "1 replica" if replicas == 1 else f"{replicas} replicas"
    counts = point.requests
    lines = [f"{counts.ok} of {counts.ok + counts.failed} requests served by {engines} of {model.name}"]
    lines += [f"  {count} failed: {error}" for error, count in sorted(point.errors.items())[:5]]
    lines.append(f"{'ms':8}" + "".join(f"{name:>10}" for name in STATISTICS))
    for metric in METRICS:
        found: Statistics = getattr(point, f"{metric}_s")
        values = [getattr(found, name) for name in STATISTICS]
        lines.append(f"{metric.upper():8}" + "".join(f"{'-' if v is None else f'{v * 1e3:,.1f}':>10}" for v in values))
    if point.output_tokens_per_s is not None:
        lines.append(f"Output {point.output_tokens_per_s:,.0f} tokens/s over {point.window_s:,.0f} s")
    for text, kept in point.constraints.items():
        lines.append(f"{text}: {'kept' if kept else 'not kept'}")
    if point.goodput_rps is not None and point.attainment is not None:
        lines.append(f"Goodput {point.goodput_rps:.2f} requests/s, attainment {point.attainment:.1%}")
    lines += [f"Not valid: {reason}" for reason in point.reasons]
    return "\n".join(lines)
