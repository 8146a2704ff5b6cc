"""Where the time of a decode step goes, kernel by kernel, from a trace of `benchmarks/h200.py --profile`.

    python benchmarks/timeline.py trace-8x2048.json.gz [--out FILE]

Kernels overlap, because one starts while the one before still runs. So each gets the time by which it moves the end of
the step: from the end of what ran before it to its own end, or from its start where nothing ran. The profiler itself
adds a little to every launch.
"""

import argparse
import gzip
import json
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

FIRST = "_gather_rows_kernel"
"""The kernel that a decode step begins with."""


def steps(events: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Kernels and copies of each decode step, in order of their start."""
    work = sorted((e for e in events if e.get("cat") in ("kernel", "gpu_memcpy")), key=lambda e: float(e["ts"]))
    marks = [index for index, event in enumerate(work) if FIRST in event["name"]]
    return [work[one:two] for one, two in pairwise(marks)]


def shares(step: list[dict[str, Any]], end: float) -> tuple[dict[str, list[float]], float]:
    """Microseconds of each kernel, and without any, until ``end``."""
    taken: dict[str, list[float]] = {}
    idle, reached = 0.0, float(step[0]["ts"])
    for event in step:
        start, stop = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        idle += max(0.0, start - reached)
        taken.setdefault(event["name"].split("<")[0].split("(")[0], []).append(max(0.0, stop - max(start, reached)))
        reached = max(reached, stop)
    return taken, idle + max(0.0, end - reached)


def summarise(trace: Path) -> dict[str, Any]:
    """Medians over the steps of a trace."""
    found = steps(json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"])
    spans = [(step, float(after[0]["ts"])) for step, after in pairwise(found[2:])]
    results = [shares(step, end) for step, end in spans]
    names = sorted({name for taken, _ in results for name in taken})
    kernels = [
        {
            "kernel": name,
            "launches": statistics.median(len(taken.get(name, [])) for taken, _ in results),
            "us_a_step": statistics.median(sum(taken.get(name, [])) for taken, _ in results),
        }
        for name in names
    ]
    return {
        "trace": trace.name,
        "steps": len(results),
        "step_us": statistics.median(end - float(step[0]["ts"]) for step, end in spans),
        "idle_us": statistics.median(idle for _, idle in results),
        "kernels": sorted(kernels, key=lambda row: -float(row["us_a_step"])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    summary = summarise(options.trace)
    print(f"step {summary['step_us']:.0f} us, of which nothing runs for {summary['idle_us']:.0f} us")
    for row in summary["kernels"]:
        print(f"{row['us_a_step']:9.1f} us {row['launches']:5.0f} x  {row['kernel']}")
    if options.out:
        options.out.write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    main()
