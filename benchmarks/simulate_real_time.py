"""Does a simulation in virtual time agree with the clock server in real time, on a slice of a recorded trace?

    python benchmarks/simulate_real_time.py TRACE --out benchmarks/results/simulate_real_time.json

Both have the same GPU model and the same requests: the first ``--requests`` of the trace, ``--scales`` times as fast,
with random tokens. `paceline.simulator.simulate` serves them in virtual time; `clock_server.py`, a real server on one
core, in real time, measured by the lab's client on the other. Both logs are measured by `lab.measure`.

The simulator takes what a request spends in HTTP, the tokenizer's process and the link from the model's ``request_s``,
which the models that come with paceline leave at 0. It is measured before: ``IDLE`` requests of the trace one after the
other, and the median of their TTFT less that of their simulation. Nothing else is fitted. ``server_cpu`` is the share
of its core that the server used: near 1 its requests wait for the processor, which no simulation knows.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from clock_server import clock_server
from meter_truth import AUTOGROUP, PACKAGES

from paceline.lab.client.log import StageLog, read_log
from paceline.lab.client.machine import machine
from paceline.lab.client.run import run_stage
from paceline.lab.measure import measure
from paceline.lab.point import Point
from paceline.lab.simulated import observed, simulated_log
from paceline.lab.stage import Stage
from paceline.lab.target import Target
from paceline.lab.workload import traces
from paceline.lab.workload.arrivals import closed_stage, open_stage
from paceline.lab.workload.draft import Draft
from paceline.simulator.gpu_model import GpuModel
from paceline.simulator.simulate import SimulatedRequest, simulate, trace_prompt

IDLE = 40
METRICS = ("ttft_s", "tpot_s", "e2e_s")
STATISTICS = ("mean", "p50", "p90", "p99")


def drafts_of(rows: Sequence[traces.TraceRow]) -> list[Draft]:
    rng = np.random.default_rng(0)
    sizes = [(max(1, row.input_tokens), max(1, row.output_tokens)) for row in rows]
    return [Draft(rng.integers(1000, 40_000, size).tolist(), output, size) for size, output in sizes]


def serve(stage: Stage, url: str) -> StageLog:
    with tempfile.TemporaryDirectory() as folder:
        run_stage(Target("clock", url, "smollm2"), stage, Path(folder, "log"), workers=1)
        return read_log(Path(folder, "log"))


def way_s(drafts: Sequence[Draft], url: str, model: GpuModel) -> float:
    """Seconds that a request spends outside of the engine, by the first requests, one after the other."""
    log = serve(closed_stage("idle", drafts[:IDLE], 1, deadline_s=300.0), url)
    seen = observed(log)
    outcomes = simulate([each.request for each in seen], model)
    pairs = [(each.ttft_s, outcome.ttft) for each, outcome in zip(seen, outcomes, strict=True)]
    return median(real - virtual for real, virtual in pairs if real is not None and virtual is not None)


def simulated(stage: Stage, model: GpuModel) -> StageLog:
    requests = [
        SimulatedRequest(request.due, trace_prompt(request.id, len(request.prompt)), request.output_tokens)
        for request in stage.requests
    ]
    return simulated_log(stage, simulate(requests, model), model)


def figures(point: Point) -> dict[str, Any]:
    found = {name: getattr(point, name) for name in METRICS}
    return {
        **{name: {each: round(getattr(found[name], each), 5) for each in STATISTICS} for name in METRICS},
        "output_tokens_per_s": round(point.output_tokens_per_s or 0.0, 1),
    }


def compare(rows: Sequence[traces.TraceRow], scale: float, model: GpuModel, cores: Sequence[int]) -> dict[str, Any]:
    due = [row.time_s / scale for row in rows]
    drafts, rate = drafts_of(rows), (len(rows) - 1) / due[-1]
    load = {"kind": "trace", "scale": scale}
    stage = open_stage(f"scale={scale:g}", drafts, due, load, offered_rate=rate, deadline_s=600.0)
    with clock_server(cores, model) as server:
        request_s = way_s(drafts, server.url, model)
        before = server.cpu_seconds()
        served = measure(serve(stage, server.url))
        used = server.cpu_seconds() - before
    virtual = measure(simulated(stage, replace(model, request_s=request_s)))
    real, guess = figures(served), figures(virtual)
    return {
        "gpu_model": asdict(model),
        "scale": scale,
        "offered_rate": round(rate, 3),
        "requests": len(rows),
        "served": served.requests.ok,
        "valid": served.valid,
        "reasons": served.reasons,
        "server_cpu": round(used / (served.window_s or 1.0), 3),
        "request_s": round(request_s, 5),
        "errors": {
            **{
                name: {each: round(guess[name][each] / real[name][each] - 1, 4) for each in STATISTICS}
                for name in METRICS
            },
            "output_tokens_per_s": round(guess["output_tokens_per_s"] / real["output_tokens_per_s"] - 1, 4),
        },
        "real_time": real,
        "virtual_time": guess,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--gpu-models", nargs="+", default=["example", "h200-llama3-8b-fp8kv"])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--scales", type=float, nargs="+", default=[1, 4, 8])
    parser.add_argument("--server-cores", type=int, nargs="+", default=[0])
    parser.add_argument("--client-core", type=int, default=1)
    parser.add_argument("--out", type=Path, help="result file; the run is added to those that it has")
    options = parser.parse_args()
    os.sched_setaffinity(0, {options.client_core})
    load = os.getloadavg()[0]
    rows = traces.slice(traces.read_trace(options.trace), count=options.requests)
    found = []
    for model, scale in product(map(GpuModel.load, options.gpu_models), options.scales):
        found.append(compare(rows, scale, model, options.server_cores))
        print(json.dumps({name: value for name, value in found[-1].items() if name != "gpu_model"}), flush=True)
    if options.out is not None:
        result = {
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "command": " ".join([sys.argv[0], options.trace.name, *sys.argv[2:]]),
            "load_average_before": round(load, 2),
            "nice": os.nice(0),
            "autogroup": AUTOGROUP.read_text().strip() if AUTOGROUP.exists() else None,
            "machine": {**machine(), "cores": os.cpu_count()},
            "packages": {name: version(name) for name in PACKAGES},
            "rows": found,
        }
        runs = json.loads(options.out.read_text()) if options.out.exists() else []
        options.out.write_text(json.dumps([*runs, result], indent=1) + "\n")


if __name__ == "__main__":
    main()
