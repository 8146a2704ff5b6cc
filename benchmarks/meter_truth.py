"""Is the load client's meter true? Its figures against those of a server that stamps its own writes.

    python benchmarks/meter_truth.py --server paced --out benchmarks/results/meter_truth.json
    python benchmarks/meter_truth.py --server clock --out benchmarks/results/meter_truth_clock.json

The server has one core, the client the other. Truth is what the server knows, of the same requests. A token is there
when the server's write of it to the socket has returned, so a queue in the server is in the truth.

- ``paced`` (`paced_server.py`) replays bytes, so it carries any load. TTFT counts from the client's scheduled send.
- ``clock`` (`clock_server.py`) is `paceline serve --simulate` with a step of one TPOT. Its socket log is the whole
  truth: TTFT counts from the arrival of the request at the kernel, so the client's lateness of sending is an error.
  Where the server falls behind it sends the tokens of several steps in one write (``tokens_per_write``) and refuses
  requests (``served``), and the client still has to agree with its log. ``cpu`` is the share of its core that it used.

Each case's figures come from `lab.measure`, with the verdict that a user gets. Errors are shares of the truth: of the
mean and the 99th percentile of TTFT, of the mean TPOT, of throughput and of goodput, which counts requests with a TTFT
below 1.02 times the truth's 90th percentile (inside a wide distribution, beyond a narrow one) and a TPOT below 1.25
times the nominal one. A case passes when the point is valid and TTFT mean, TPOT, throughput and goodput are within 2%,
TTFT p99 within 5%. Above ``MUST_CHUNKS_PER_S`` a case passes too if the point is marked invalid.

Both sides inherit this process's priority: ``nice -n -19`` keeps other work on the machine out of the figures. Where
the kernel shares its time among sessions first, ``echo -19 > /proc/self/autogroup`` raises that of this one.
"""

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from clock_server import clock_server
from paced_server import paced_server

from paceline.engine.step_time import StepTime
from paceline.lab.client.log import StageLog, read_log
from paceline.lab.client.machine import machine
from paceline.lab.client.run import run_stage
from paceline.lab.measure import measure
from paceline.lab.slo import parse_constraints
from paceline.lab.stage import Stage
from paceline.lab.target import Target
from paceline.lab.workload.arrivals import closed_stage, open_stage, poisson
from paceline.lab.workload.draft import Draft
from paceline.simulator.gpu_model import EngineSizes, GpuModel

PACED_TTFT = 0.12
MUST_CHUNKS_PER_S = 12_000
PACKAGES = ("fastapi", "httptools", "msgspec", "pyzmq", "starlette", "uvicorn")
"""That the clock server's speed depends on."""
AUTOGROUP = Path("/proc/self/autogroup")


@dataclass(frozen=True)
class Case:
    """Open loop with a rate, else a closed loop of so many streams."""

    tokens: int
    tpot: float
    requests: int
    rate: float | None = None
    streams: int | None = None

    @property
    def chunks_per_s(self) -> float:
        return self.rate * self.tokens if self.rate else (self.streams or 0) / self.tpot

    def stage(self) -> Stage:
        drafts = [Draft([i] * 8, self.tokens, 8) for i in range(self.requests)]
        if self.streams is not None:
            return closed_stage("case", drafts, self.streams, deadline_s=300.0)
        assert self.rate is not None
        load, due = {"kind": "poisson", "rate": self.rate}, poisson(self.requests, self.rate, seed=0)
        return open_stage("case", drafts, due, load, offered_rate=self.rate, deadline_s=300.0)


CASES = [
    Case(32, 0.015, 400, rate=10.0),
    Case(32, 0.015, 1500, rate=100.0),
    Case(64, 0.05, 2000, streams=500),
    Case(64, 0.1, 4000, streams=1000),
    Case(16, 0.015, 6000, rate=500.0),
    *(Case(32, 0.015, round(15 * rate), rate=float(rate)) for rate in (200, 280, 375, 500, 700, 1000)),
]


@dataclass(frozen=True)
class Truth:
    """Of every request, seconds by the monotonic clock."""

    began: np.ndarray
    first: np.ndarray
    last: np.ndarray
    server: dict[str, float] = field(default_factory=dict)
    """What else it tells of itself."""

    @property
    def ttft_p90(self) -> float:
        return float(np.percentile(self.first - self.began, 90))

    def figures(self, case: Case, ttft_limit: float, tpot_limit: float) -> dict[str, float]:
        ttft, tpot = self.first - self.began, (self.last - self.first) / (case.tokens - 1)
        window = self.last.max() - self.began.min()
        return {
            "ttft_mean": float(ttft.mean()),
            "ttft_p99": float(np.percentile(ttft, 99)),
            "tpot_mean": float(tpot.mean()),
            "tokens_per_s": len(ttft) * case.tokens / float(window),
            "goodput": float(((ttft < ttft_limit) & (tpot < tpot_limit)).sum() / window),
        }


def run_paced(case: Case, core: int, path: Path) -> tuple[StageLog, Truth]:
    with tempfile.TemporaryDirectory() as folder:
        truth = Path(folder, "truth.json")
        with paced_server(core, PACED_TTFT, case.tpot, truth) as url:
            run_stage(Target("paced", url, "paced"), case.stage(), path, workers=1)
        written = {int(number): times for number, times in json.loads(truth.read_text()).items()}
    log = read_log(path)
    assert log.clock_start is not None
    times = [written[record.id] for record in log.records]
    due = np.array([log.clock_start + record.due for record in log.records])
    return log, Truth(due, np.array([each[1] for each in times]), np.array([each[-1] for each in times]))


def run_clock(case: Case, core: int, path: Path) -> tuple[StageLog, Truth]:
    sizes = EngineSizes(num_blocks=8193, max_model_len=8192, max_num_seqs=4096)
    with clock_server([core], GpuModel(name="steady", step_time=StepTime(fixed_s=case.tpot), engine=sizes)) as server:
        before = server.cpu_seconds()
        run_stage(Target("clock", server.url, "smollm2"), case.stage(), path, workers=1)
        used = server.cpu_seconds() - before
    log = read_log(path)
    assert log.clock_start is not None
    # What came before is the client's question which fields the server takes. A server that is full refuses some.
    lines = [line for line in server.lines if line["arrived"] > log.clock_start]
    assert len(lines) == case.requests, "a request is missing"
    lines = [line for line in lines if line["completion_tokens"] is not None]
    assert all(line["completion_tokens"] == case.tokens for line in lines), "a reply is not whole"
    began, first, last = (np.array([line[name] for line in lines]) for name in ("arrived", "first", "last"))
    about = {
        "cpu": round(used / float(last.max() - began.min()), 3),
        "tokens_per_write": round(len(lines) * case.tokens / sum(len(line["events"]) for line in lines), 3),
    }
    return log, Truth(began, first, last, about)


def check(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    run = {"paced": run_paced, "clock": run_clock}[options.server]
    with tempfile.TemporaryDirectory() as folder:
        log, truth = run(case, options.server_core, Path(folder, "log"))
    ttft_limit, tpot_limit = 1.02 * truth.ttft_p90, 1.25 * case.tpot
    point = measure(log, parse_constraints(f"ttft_p99 < {ttft_limit:g}s, tpot_mean < {1000 * tpot_limit:g}ms"))
    true = truth.figures(case, ttft_limit, tpot_limit)
    measured = {
        "ttft_mean": point.ttft_s.mean,
        "ttft_p99": point.ttft_s.p99,
        "tpot_mean": point.tpot_s.mean,
        "tokens_per_s": point.output_tokens_per_s,
        "goodput": point.goodput_rps,
    }
    errors = {name: (measured[name] or 0.0) / true[name] - 1 if true[name] else 0.0 for name in true}
    right = point.requests.ok == len(truth.first) and all(
        abs(error) <= (0.05 if name == "ttft_p99" else 0.02) for name, error in errors.items()
    )
    return {
        "load": log.stage.load,
        "tokens": case.tokens,
        "tpot": case.tpot,
        "requests": case.requests,
        "served": len(truth.first),
        "chunks_per_s": round(case.chunks_per_s),
        "passes": (right and point.valid) or (not point.valid and case.chunks_per_s > MUST_CHUNKS_PER_S),
        "right": right,
        "valid": point.valid,
        "reasons": point.reasons,
        "errors": {name: round(error, 4) for name, error in errors.items()},
        "truth": {name: round(value, 5) for name, value in true.items()},
        "server": truth.server,
        "client": {name: round(value, 6) for name, value in log.client.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", choices=("paced", "clock"), default="paced")
    parser.add_argument("--cases", type=int, nargs="+", default=range(len(CASES)), help="indexes")
    parser.add_argument("--server-core", type=int, default=0)
    parser.add_argument("--client-core", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.sched_setaffinity(0, {options.client_core})
    load = os.getloadavg()[0]
    rows = []
    for index in options.cases:
        rows.append(check(CASES[index], options))
        print(json.dumps({name: value for name, value in rows[-1].items() if name != "truth"}), flush=True)
    if options.out is not None:
        result = {
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "command": " ".join(sys.argv),
            "load_average_before": round(load, 2),
            "nice": os.nice(0),
            "autogroup": AUTOGROUP.read_text().strip() if AUTOGROUP.exists() else None,
            "machine": {**machine(), "cores": os.cpu_count()},
            "packages": {name: version(name) for name in PACKAGES},
            "rows": rows,
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(not all(row["passes"] for row in rows))


if __name__ == "__main__":
    main()
