"""Does a step-time model fitted to some runs on the GPU predict the others?

    python benchmarks/predict_h200.py --rows benchmarks/results/h200-DATE.jsonl --step-logs FOLDER \
        --out benchmarks/results/predict_h200.json --models src/paceline/simulator/models

``--rows`` and ``--step-logs`` come from `h200.py --step-logs FOLDER`. For each row that can be simulated, a model is
fitted to the steps of all other rows of its mode; the row's load is simulated with it by the real scheduler, with the
sizes of the row's engine; and what comes out is compared with what was measured. TPOT, TTFT and throughput are counted
as in the row. Each row weighs as much in a fit as any other, whatever its number of steps.

``--models`` writes a GPU model of each mode fitted to all its rows, with the errors of the predictions, for modes in
``SHIPPED``.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import h200_loads as loads
import numpy as np

from paceline.engine.step_log import LoggedStep, read_step_log
from paceline.engine.step_time import StepTime
from paceline.simulator.fit_steps import WINDOW, StepFit, fit_steps
from paceline.simulator.gpu_model import EngineSizes, GpuModel
from paceline.simulator.simulate import Outcome, SimulatedRequest, simulate, trace_prompt

METRICS = {
    "tpot": ("tpot_ms",),
    "throughput": ("out_tps",),
    "rps": ("ttft_mean", "tpot_mean_ms", "out_tps"),
    "mixed": ("out_tps", "prompt_tps"),
}
"""Keys of rows that are predicted."""
WITHIN = 0.1
SATURATED = 0.8
"""Of the rate that a simulated burst reaches: above it TTFT is that of a queue, which a small error of steps changes
much."""
BURST = 512
"""Its requests."""
STEPS = 400
"""Of a row in a fit."""
SHIPPED = ("bf16", "fp8kv")


@dataclass(frozen=True)
class Measured:
    """A row with its engine and steps."""

    row: dict[str, Any]
    engine: EngineSizes
    steps: list[LoggedStep]

    @property
    def name(self) -> str:
        return loads.row_name(self.row)


@dataclass(frozen=True)
class Predicted:
    """A row, and what a model fitted to the others says of it."""

    measured: Measured
    fit: StepFit
    values: dict[str, float]
    """By key of the row."""
    queue: bool
    """It is near saturation, so that its TTFT is that of a queue."""

    @property
    def errors(self) -> dict[str, float]:
        """Relative to what was measured."""
        return {key: value / self.measured.row[key] - 1 for key, value in self.values.items()}


@dataclass
class Summary:
    count: int = 0
    within: int = 0
    mean: float = 0.0
    max: float = 0.0
    worst: list[str] = field(default_factory=list)
    """What is not within."""

    @classmethod
    def of(cls, errors: dict[str, float]) -> "Summary":
        sizes = np.abs(list(errors.values()))
        worst = [name for name, error in errors.items() if abs(error) > WITHIN]
        return cls(len(errors), len(errors) - len(worst), float(sizes.mean()), float(sizes.max()), worst)


def read_rows(rows: Iterable[dict[str, Any]], step_logs: Path) -> dict[str, list[Measured]]:
    """By mode, the rows that were measured with a step log and can be simulated.

    Raises:
        ValueError: a row names steps that its log does not have, or an engine that the rows do not.
    """
    engines: dict[str, EngineSizes] = {}
    logs: dict[str, list[LoggedStep]] = {}
    found: dict[str, list[Measured]] = defaultdict(list)
    for row in rows:
        log = row.get("step_log")
        if log is None:
            continue
        if row["kind"] == "start":
            engines[log] = EngineSizes(**row["sizes"])
        elif row["kind"] in METRICS:
            if log not in engines:
                raise ValueError(f"{log}: no row says how its engine started")
            if log not in logs:
                logs[log] = read_step_log(step_logs / log)
            begin, end = row["steps"]
            if not 0 <= begin < end <= len(logs[log]):
                raise ValueError(f"{log}: has {len(logs[log])} steps, not {begin} to {end}")
            found[row["mode"]].append(Measured(row, engines[log], logs[log][begin:end]))
    return found


def fit_rows(rows: Sequence[Measured]) -> StepFit:
    """Fits to as many windows of each row: half of them spread evenly over its steps, half over its time, of which a
    few long steps may take the most."""
    steps: list[LoggedStep] = []
    half = STEPS // WINDOW // 2
    for row in rows:
        starts = range(0, len(row.steps) - WINDOW + 1, WINDOW)
        windows = [row.steps[start : start + WINDOW] for start in starts] or [row.steps]
        so_far = np.cumsum([sum(step.seconds for step in window) for window in windows])
        by_count = np.linspace(0, len(windows) - 1, half).round().astype(int)
        by_time = np.searchsorted(so_far, (np.arange(half) + 0.5) / half * so_far[-1])
        steps += [step for index in (*by_count, *by_time) for step in windows[index]]
    return fit_steps(steps)


def burst(model: GpuModel, prompt: int, output: int, count: int) -> float:
    """Seconds until all of ``count`` requests that are sent at once have their tokens."""
    requests = [SimulatedRequest(0.0, trace_prompt(index, prompt), output) for index in range(count)]
    return max(last(outcome) for outcome in simulate(requests, model, prefix_cache=False))


def capacity(model: GpuModel) -> float:
    """Requests a second of a burst of those that arrive one by one in other rows."""
    return BURST / burst(model, loads.PROMPT, loads.OUTPUT, BURST)


def last(outcome: Outcome) -> float:
    if outcome.last is None:
        raise ValueError(f"a simulated request failed: {outcome.error}")
    return outcome.last


def predict(row: dict[str, Any], model: GpuModel) -> dict[str, float]:
    """What a simulation says of the row's `METRICS`."""
    match row["kind"]:
        case "tpot":
            batch, prompt = row["batch"], row["prompt"]
            many, one = (burst(model, prompt, output, batch) for output in (loads.BURST_OUTPUT, 1))
            return {"tpot_ms": (many - one) / (loads.BURST_OUTPUT - 1) * 1e3}
        case "throughput":
            return {"out_tps": row["n"] * row["out"] / burst(model, row["inp"], row["out"], row["n"])}
        case "rps":
            return rate(row, model)
        case "mixed":
            return mixed(row, model)
        case kind:
            raise ValueError(f"{kind}: no load of a simulation")


def rate(row: dict[str, Any], model: GpuModel) -> dict[str, float]:
    due = loads.poisson(row["rps"], row["n"])
    requests = [
        SimulatedRequest(when, trace_prompt(index, loads.PROMPT), loads.OUTPUT) for index, when in enumerate(due)
    ]
    outcomes = simulate(requests, model, prefix_cache=False)
    seconds = max(map(last, outcomes))
    return {
        "ttft_mean": float(np.mean([outcome.ttft for outcome in outcomes])),
        "tpot_mean_ms": float(np.mean([outcome.tpot for outcome in outcomes])) * 1e3,
        "out_tps": row["n"] * loads.OUTPUT / seconds,
    }


def mixed(row: dict[str, Any], model: GpuModel) -> dict[str, float]:
    decoding = [
        SimulatedRequest(0.0, trace_prompt(index, loads.DECODING_PROMPT), loads.DECODING_OUTPUT)
        for index in range(loads.DECODING)
    ]
    first = simulate([replace(one, output_tokens=1) for one in decoding], model, prefix_cache=False)
    begin = max(map(last, first))
    end = begin + loads.MIXED_S
    # Twice as many prompts as were measured, or those that decode were alone in the end.
    count = loads.ARRIVING + int(2 * row["prompt_tps"] * loads.MIXED_S / loads.PROMPT)
    prompts = [
        SimulatedRequest(
            begin if index < loads.ARRIVING else 0.0,
            trace_prompt(loads.DECODING + index, loads.PROMPT),
            1,
            after=None if index < loads.ARRIVING else loads.DECODING + index - loads.ARRIVING,
        )
        for index in range(count)
    ]
    outcomes = simulate([*decoding, *prompts], model, prefix_cache=False)
    tokens = [sum(begin < at <= end for at, _ in outcome.tokens) for outcome in outcomes]
    return {
        "out_tps": sum(tokens[: loads.DECODING]) / loads.MIXED_S,
        "prompt_tps": sum(tokens[loads.DECODING :]) * loads.PROMPT / loads.MIXED_S,
    }


def leave_one_out(rows: Sequence[Measured]) -> list[Predicted]:
    """Predicts each row from the others; one that was measured twice is left out twice."""
    predictions = []
    for row in rows:
        fit = fit_rows([other for other in rows if other.name != row.name])
        model = GpuModel(name="others", step_time=fit.step_time, engine=row.engine)
        queue = row.row["kind"] == "rps" and row.row["rps"] > SATURATED * capacity(model)
        predictions.append(Predicted(row, fit, predict(row.row, model), queue))
        print(f"{row.row['mode']} {row.name}", file=sys.stderr)
    return predictions


def named_errors(predictions: Sequence[Predicted], *, queues: bool) -> dict[str, float]:
    return {
        f"{one.measured.row['mode']} {one.measured.name}: {key}": error
        for one in predictions
        for key, error in one.errors.items()
        if queues or not (one.queue and key == "ttft_mean")
    }


def table(predictions: Sequence[Predicted]) -> str:
    lines = ["| mode | row | quantity | measured | predicted | error |", "|---|---|---|---|---|---|"]
    for one in predictions:
        for key, error in one.errors.items():
            queue = " (near saturation)" if one.queue and key == "ttft_mean" else ""
            values = " | ".join(
                f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
                for value in (one.measured.row[key], one.values[key])
            )
            row = f"{one.measured.row['mode']} | {one.measured.name} | `{key}`{queue}"
            lines.append(f"| {row} | {values} | {100 * error:+.1f}% |")
    return "\n".join(lines)


def rounded(step_time: StepTime) -> StepTime:
    return StepTime(**{name: float(f"{value:.4g}") for name, value in asdict(step_time).items()})


def shipped_model(mode: str, rows: Sequence[Measured], predictions: Sequence[Predicted], source: str) -> GpuModel:
    """Fitted to all rows; of the engine that had no flags."""
    engine = next((row.engine for row in rows if not row.row["flags"]), rows[0].engine)
    fit = fit_rows(rows)
    summary = Summary.of(named_errors(predictions, queues=False))
    errors = {"left_out_mean": summary.mean, "left_out_max": summary.max, "steps_mean": fit.error["mean"]}
    commits = ", ".join(sorted({row.row["commit"] for row in rows}))
    return GpuModel(
        name=f"h200-llama3-8b-{mode}",
        step_time=rounded(fit.step_time),
        engine=engine,
        machine=f"NVIDIA H200, Llama-3-8B shape, {mode} (docs/performance.md)",
        fitted=f"to steps of {len(rows)} runs ({source}, paceline at {commits}) by benchmarks/predict_h200.py. Errors "
        "left_out are those of predicting each run by a fit to the others, but for TTFT near saturation.",
        error={name: round(value, 4) for name, value in errors.items()},
    )


def document(predictions: Sequence[Predicted], all_rows: Sequence[dict[str, Any]], source: str) -> dict[str, Any]:
    machine = ("gpu", "driver", "torch", "triton", "cuda")
    machines = [{key: row[key] for key in machine} for row in all_rows if row["kind"] == "machine"]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", "benchmarks/predict_h200.py", *sys.argv[1:]]),
        "rows": source,
        "commits_of_rows": sorted({one.measured.row["commit"] for one in predictions}),
        "machines_of_rows": [one for index, one in enumerate(machines) if one not in machines[:index]],
        "summary": asdict(Summary.of(named_errors(predictions, queues=False))),
        "summary_with_ttft_near_saturation": asdict(Summary.of(named_errors(predictions, queues=True))),
        "predictions": [
            {
                "mode": one.measured.row["mode"],
                "row": one.measured.name,
                "near_saturation": one.queue,
                "measured": {key: one.measured.row[key] for key in one.values},
                "predicted": one.values,
                "error": one.errors,
                "fitted_without_it": asdict(one.fit),
            }
            for one in predictions
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--step-logs", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", type=Path, help="folder for GPU models")
    options = parser.parse_args()
    all_rows = [json.loads(line) for line in options.rows.read_text().splitlines()]
    by_mode = read_rows(all_rows, options.step_logs)
    if not by_mode:
        parser.error(f"{options.rows}: no row names a step log")
    predictions = {mode: leave_one_out(rows) for mode, rows in by_mode.items()}
    every = [one for group in predictions.values() for one in group]
    result = document(every, all_rows, options.rows.name)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    if options.models:
        for mode in SHIPPED:
            if mode in by_mode:
                model = shipped_model(mode, by_mode[mode], predictions[mode], options.rows.name)
                options.models.mkdir(parents=True, exist_ok=True)
                model.save(options.models / f"{model.name}.json")
    print(table(every))
    for name in ("summary", "summary_with_ttft_near_saturation"):
        print(f"\n{name}: {json.dumps(result[name])}")


if __name__ == "__main__":
    main()
