"""How many SSE chunks a second one worker of the load client takes, on one core.

    python benchmarks/client_speed.py --out benchmarks/results/client_speed.json

The server (`paced_server.py`) replays bytes at a known pace on one core; the client has the other. So many streams get
one token each per ``streams / rate`` seconds.

- ``chunks_per_receive``: events that came with one receive. Above 1 the client was behind, or the server wrote two
  before the client looked.
- ``delay_ms``: from the server's write of a token to the client's stamp; it holds what the kernel takes.
- ``cpu``: share of its core that the worker used in its busiest second.
- ``us_per_chunk``: processor time (user and system) of the worker over the whole stage, its start, its sends and the
  writing of the log included, divided by the chunks. ``chunks_per_core_s`` is its inverse.

Both sides inherit this process's priority: ``nice -n -19`` keeps other work on the machine out of the figures.
"""

import argparse
import json
import os
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from paced_server import paced_server

from paceline.lab.client.log import StageLog, read_log
from paceline.lab.client.machine import machine
from paceline.lab.client.run import run_stage
from paceline.lab.stage import PlannedRequest, Stage
from paceline.lab.target import Target


def measure(rate: float, streams: int, seconds: float, options: argparse.Namespace) -> dict[str, Any]:
    tokens = max(2, round(seconds * rate / streams))
    tpot = streams / rate
    # Spread over one period, as a real engine's streams would not be, so that the rate is even.
    requests = [PlannedRequest(i, i * tpot / streams + i * 0.0005, [i] * 8, tokens) for i in range(streams)]
    stage = Stage(f"{rate:g} chunks/s", requests, {"kind": "burst"}, deadline_s=10 * seconds + 30)
    with tempfile.TemporaryDirectory() as folder:
        truth, path = Path(folder, "truth.json"), Path(folder, "log")
        with paced_server(options.server_core, 0.1 + streams * 0.0005, tpot, truth) as url:
            before = os.times()
            run_stage(Target("paced", url, "paced"), stage, path, workers=1)
            after = os.times()
        log = read_log(path)
        written = {int(number): times for number, times in json.loads(truth.read_text()).items()}
    events = streams * tokens
    assert all(record.ok and record.output_tokens == tokens for record in log.records), "a reply is not whole"
    times = [time for record in log.records for time, _ in record.deltas]
    return {
        "offered_chunks_per_s": rate,
        "streams": streams,
        "tokens": tokens,
        "chunks_per_s": round(events / (max(times) - min(times))),
        "server_chunks_per_s": round(events / span(written)),
        "chunks_per_receive": round(events / log.client["chunks"], 3),
        "bytes_per_chunk": round(log.client["bytes"] / events),
        "cpu": round(log.client["cpu"], 3),
        "us_per_chunk": round(1e6 * children_seconds(before, after) / events, 2),
        "chunks_per_core_s": round(events / children_seconds(before, after)),
        "delay_ms": delays(log, written),
        "loop_delay_p99_ms": round(1e3 * log.client["loop_delay_p99_s"], 3),
        "lateness_p99_ms": round(1e3 * log.client["lateness_p99_s"], 3),
    }


def span(written: dict[int, list[float]]) -> float:
    return max(times[-1] for times in written.values()) - min(times[1] for times in written.values())


def children_seconds(before: os.times_result, after: os.times_result) -> float:
    """Of the worker: the only child that has ended in between."""
    return after.children_user + after.children_system - before.children_user - before.children_system


def delays(log: StageLog, written: dict[int, list[float]]) -> dict[str, float]:
    """Milliseconds from a token's write to its stamp. A stamp before the write has returned is below 0."""
    assert log.clock_start is not None
    found = sorted(
        1e3 * (log.clock_start + time - stamp)
        for record in log.records
        for (time, _), stamp in zip(record.deltas, written[record.id][1:], strict=True)
    )
    ranks = {"p50": 0.5, "p99": 0.99, "p999": 0.999}
    return {
        **{name: round(found[int(share * len(found))], 3) for name, share in ranks.items()},
        "max": round(found[-1], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[5000, 10000, 20000, 30000, 40000, 50000])
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--server-core", type=int, default=0)
    parser.add_argument("--client-core", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.sched_setaffinity(0, {options.client_core})
    load = os.getloadavg()[0]
    rows = []
    for rate in options.rates:
        rows.append(measure(rate, options.streams, options.seconds, options))
        print(json.dumps(rows[-1]), flush=True)
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


if __name__ == "__main__":
    main()
