"""A step-time model of an H200 from the totals that `benchmarks/h200.py` measured.

    python benchmarks/step_time_h200.py --mode fp8kv --out src/paceline/simulator/models/h200-llama3-8b-fp8kv.json

All requests of such a run are sent at once, so which steps there are does not depend on how long they take: the
scheduler says it, and each total is a sum of known steps. The coefficients make the squared relative errors of the
totals least, none below 0, for the best of many knees. ``left_out_mean`` and ``left_out_max`` are the errors for each
total of a fit to the others. A step log (`paceline serve --step-log`) tells far more; this is for results that have
none.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.engine.step_time import StepTime, StepWork
from paceline.simulator.fit_steps import nonnegative
from paceline.simulator.gpu_model import EngineSizes, GpuModel
from paceline.simulator.simulate import SimulatedRequest, simulate, trace_prompt

Floats = NDArray[np.float64]

RESULTS = "benchmarks/results/h200-2026-11-30.jsonl"
GIB = 2**30
MEMORY = int(0.9 * 139 * GIB)
"""Of the GPU, less the tenth that the engine leaves."""
WEIGHTS = {"bf16": 15 * GIB, "fp8": 9 * GIB, "fp8kv": 9 * GIB}
KV_TOKEN = {"bf16": 2**17, "fp8": 2**17, "fp8kv": 2**16}
"""Bytes: 32 layers, keys and values, 8 heads of 128."""
WORKING = 4 * GIB
BLOCK = 64
KNEES = np.geomspace(32, 1024, 60)


@dataclass(frozen=True)
class Total:
    """A measured time, and the steps that it is the sum of, less others."""

    name: str
    seconds: float
    steps: list[StepWork]
    less: list[StepWork]


def steps_of(engine: EngineSizes, prompt: int, output: int, count: int) -> list[StepWork]:
    steps: list[StepWork] = []
    burst = [SimulatedRequest(0.0, trace_prompt(index, prompt), output) for index in range(count)]
    model = GpuModel(name="any", step_time=StepTime(fixed_s=1.0), engine=engine)
    simulate(burst, model, prefix_cache=False, on_step=lambda begin, end, work: steps.append(work))
    return [work for work in steps if work.tokens]


def totals(path: Path, mode: str, engine: EngineSizes) -> list[Total]:
    found = []
    for row in map(json.loads, path.read_text().splitlines()):
        if row["mode"] != mode:
            continue
        if row["kind"] == "tpot":
            size = f"{row['batch']} x {row['prompt']}"
            first = steps_of(engine, row["prompt"], 1, row["batch"])
            every = steps_of(engine, row["prompt"], 128, row["batch"])
            found.append(Total(f"first tokens of {size}", row["prefill_s"], first, []))
            found.append(Total(f"127 tokens after {size}", 0.127 * row["tpot_ms"], every, first))
        elif row["kind"] == "throughput":
            name = f"({row['inp']}, {row['out']}) x {row['n']}"
            found.append(Total(name, row["s"], steps_of(engine, row["inp"], row["out"], row["n"]), []))
    return found


def counts(steps: list[StepWork], knee: float) -> Floats:
    """How often fixed_s, weights_s (with token_s = weights_s / knee), row_s, kv_token_s and pair_s are in them."""
    return np.array(
        [
            len(steps),
            sum(max(1.0, work.tokens / knee) for work in steps),
            sum(work.rows for work in steps),
            sum(work.kv_tokens for work in steps),
            sum(work.prompt_pairs for work in steps),
        ]
    )


def fit(measured: Floats, by_knee: dict[float, Floats]) -> tuple[float, Floats]:
    best: tuple[float, float, Floats] | None = None
    for knee, columns in by_knee.items():
        found, loss = nonnegative(columns / measured[:, None], np.ones_like(measured))
        if best is None or loss < best[0]:
            best = loss, knee, found
    assert best is not None
    return best[1], best[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path(RESULTS))
    parser.add_argument("--mode", choices=WEIGHTS, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    tokens = (MEMORY - WEIGHTS[options.mode] - WORKING) // KV_TOKEN[options.mode]
    engine = EngineSizes(block_size=BLOCK, num_blocks=tokens // BLOCK, max_model_len=8192)
    rows = totals(options.results, options.mode, engine)
    measured = np.array([row.seconds for row in rows])
    by_knee = {
        knee: np.array([counts(row.steps, knee) - counts(row.less, knee) for row in rows]) for knee in KNEES.tolist()
    }
    knee, found = fit(measured, by_knee)
    errors = np.abs(by_knee[knee] @ found / measured - 1)
    left_out = []
    for index in range(len(rows)):
        others = np.arange(len(rows)) != index
        at, values = fit(measured[others], {each: columns[others] for each, columns in by_knee.items()})
        left_out.append(abs(by_knee[at][index] @ values / measured[index] - 1))
    for row, error, without in zip(rows, errors, left_out, strict=True):
        print(f"{row.name:28} {row.seconds:9.4f} s   error {error:6.1%}   fitted without it {without:6.1%}")
    fixed, weights, per_row, kv_token, pair = (float(f"{value:.4g}") for value in found)
    GpuModel(
        name=options.out.stem,
        step_time=StepTime(
            fixed_s=fixed,
            weights_s=weights,
            token_s=float(f"{weights / knee:.4g}"),
            row_s=per_row,
            kv_token_s=kv_token,
            pair_s=pair,
        ),
        engine=engine,
        machine=f"NVIDIA H200, Llama-3-8B shape, {options.mode} (docs/performance.md)",
        fitted=f"to {len(rows)} totals of {options.results} by benchmarks/step_time_h200.py; rough, as totals tell "
        "little of single steps. num_blocks is worked out from the memory, not measured.",
        error={
            "mean": round(float(errors.mean()), 4),
            "max": round(float(errors.max()), 4),
            "left_out_mean": round(float(np.mean(left_out)), 4),
            "left_out_max": round(float(np.max(left_out)), 4),
        },
    ).save(options.out)


if __name__ == "__main__":
    main()
