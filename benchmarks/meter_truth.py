"""Is the load client's meter true? Its figures against those of a server that stamps its own writes.

    python benchmarks/meter_truth.py --out benchmarks/results/meter_truth.json

The server (`paced_server.py`) has one core, the client the other. Truth, of the same requests: a token is there when
the server's write of it to the socket has returned; TTFT is counted from the scheduled send, as the client does. A
queue in the server is in the truth. Each case's figures come from `lab.measure`, with the verdict that a user gets.

Errors are shares of the truth: of the mean and the 99th percentile of TTFT, of the mean TPOT, of throughput and of
goodput (TTFT below 1.5 times its pace, TPOT below 1.25 times). A case passes when the point is valid and TTFT mean,
TPOT, throughput and goodput are within 2%, TTFT p99 within 5%. Above ``MUST_CHUNKS_PER_S`` a case passes too if the
point is marked invalid. The seats of a closed loop start 0.1 ms apart: nobody sends 1,000 requests at one instant.

Both sides inherit this process's priority: ``nice -n -19`` keeps other work on the machine out of the figures.
"""

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from paced_server import paced_server

from paceline.lab.client.log import StageLog, read_log
from paceline.lab.client.machine import machine
from paceline.lab.client.run import run_stage
from paceline.lab.measure import measure
from paceline.lab.slo import parse_constraints
from paceline.lab.stage import PlannedRequest, Stage
from paceline.lab.target import Target
from paceline.lab.workload.arrivals import poisson

TTFT = 0.12
MUST_CHUNKS_PER_S = 12_000


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
        if self.rate is not None:
            due = poisson(self.requests, self.rate, seed=0)
            requests = [PlannedRequest(i, due[i], [i] * 8, self.tokens) for i in range(self.requests)]
            load: dict[str, Any] = {"kind": "poisson", "rate": self.rate}
        else:
            seats = self.streams or 1
            requests = [self._of_seat(i, seats) for i in range(self.requests)]
            load = {"kind": "concurrency", "batch": seats}
        return Stage("case", requests, load, 300.0, offered_rate=self.rate, batch=self.streams)

    def _of_seat(self, i: int, seats: int) -> PlannedRequest:
        if i < seats:
            return PlannedRequest(i, i * 0.0001, [i] * 8, self.tokens)
        return PlannedRequest(i, 0.0, [i] * 8, self.tokens, after=i - seats)


CASES = [
    Case(32, 0.015, 400, rate=10.0),
    Case(32, 0.015, 1500, rate=100.0),
    Case(64, 0.05, 2000, streams=500),
    Case(64, 0.1, 4000, streams=1000),
    Case(16, 0.015, 6000, rate=500.0),
    *(Case(32, 0.015, round(15 * rate), rate=float(rate)) for rate in (200, 280, 375, 500, 700, 1000)),
]


def truth_of(log: StageLog, written: dict[int, list[float]], case: Case) -> dict[str, float]:
    """The figures of the server's own stamps, seconds."""
    assert log.clock_start is not None
    due = np.array([log.clock_start + record.due for record in log.records])
    first = np.array([written[record.id][1] for record in log.records])
    last = np.array([written[record.id][-1] for record in log.records])
    ttft, tpot = first - due, (last - first) / (case.tokens - 1)
    window = last.max() - due.min()
    return {
        "ttft_mean": float(ttft.mean()),
        "ttft_p99": float(np.percentile(ttft, 99)),
        "tpot_mean": float(tpot.mean()),
        "tokens_per_s": case.requests * case.tokens / float(window),
        "goodput": float(((ttft < 1.5 * TTFT) & (tpot < 1.25 * case.tpot)).sum() / window),
    }


def check(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        truth, path = Path(folder, "truth.json"), Path(folder, "log")
        with paced_server(options.server_core, TTFT, case.tpot, truth) as url:
            run_stage(Target("paced", url, "paced"), case.stage(), path, workers=1)
        log = read_log(path)
        written = {int(number): times for number, times in json.loads(truth.read_text()).items()}
    point = measure(log, parse_constraints(f"ttft_p99 < {1.5 * TTFT:g}s, tpot_mean < {1250 * case.tpot:g}ms"))
    true = truth_of(log, written, case)
    measured = {
        "ttft_mean": point.ttft_s.mean,
        "ttft_p99": point.ttft_s.p99,
        "tpot_mean": point.tpot_s.mean,
        "tokens_per_s": point.output_tokens_per_s,
        "goodput": point.goodput_rps,
    }
    errors = {name: (measured[name] or 0.0) / true[name] - 1 if true[name] else 0.0 for name in true}
    right = all(abs(error) <= (0.05 if name == "ttft_p99" else 0.02) for name, error in errors.items())
    return {
        "load": log.stage.load,
        "tokens": case.tokens,
        "tpot": case.tpot,
        "requests": case.requests,
        "chunks_per_s": round(case.chunks_per_s),
        "passes": (right and point.valid) or (not point.valid and case.chunks_per_s > MUST_CHUNKS_PER_S),
        "right": right,
        "valid": point.valid,
        "reasons": point.reasons,
        "errors": {name: round(error, 4) for name, error in errors.items()},
        "truth": {name: round(value, 5) for name, value in true.items()},
        "client": {name: round(value, 6) for name, value in log.client.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
            "machine": {**machine(), "cores": os.cpu_count()},
            "rows": rows,
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(not all(row["passes"] for row in rows))


if __name__ == "__main__":
    main()
