"""Where the time of a step goes, kernel by kernel, from a trace of `benchmarks/h200.py --profile`.

    python benchmarks/timeline.py trace-8x2048.json.gz [--out FILE]
    python benchmarks/timeline.py trace-mixed.json.gz --steps mixed

Kernels overlap, because one starts while the one before still runs, or beside it. So each gets the time by which it
moves the end of the step: from the end of what ran before it to its own end, or from its start where nothing ran. The
profiler itself adds a little to every launch.
"""

import argparse
import gzip
import json
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

SAMPLER = "_race"
"""The kernel that a step ends with."""
DECODE = "_gather_rows_kernel"
"""The kernel that a captured decode step begins with, and no other has."""


def steps(events: list[dict[str, Any]], kind: str) -> list[tuple[float, list[dict[str, Any]]]]:
    """Of each decode or mixed step: when the sampler before it ended, and its kernels and copies by their start."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    work = sorted((e for e in events if e.get("cat") in kinds), key=lambda e: float(e["ts"]))
    samplers = [index for index, event in enumerate(work) if SAMPLER in event["name"]]
    found = [(end(work[one]), work[one + 1 : two + 1]) for one, two in pairwise(samplers)]
    return [step for step in found if any(DECODE in event["name"] for event in step[1]) == (kind == "decode")]


def end(event: dict[str, Any]) -> float:
    return float(event["ts"]) + float(event["dur"])


def shares(begin: float, step: list[dict[str, Any]]) -> tuple[dict[str, list[float]], float]:
    """Microseconds of each kernel, and without any."""
    taken: dict[str, list[float]] = {}
    idle, reached = 0.0, begin
    for event in step:
        start, stop = float(event["ts"]), end(event)
        idle += max(0.0, start - reached)
        taken.setdefault(event["name"].split("<")[0].split("(")[0], []).append(max(0.0, stop - max(start, reached)))
        reached = max(reached, stop)
    return taken, idle


def summarise(trace: Path, kind: str) -> dict[str, Any]:
    """Medians over the steps of a trace."""
    found = steps(json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"], kind)[2:]
    results = [shares(begin, step) for begin, step in found]
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
        "kind": kind,
        "steps": len(results),
        "step_us": statistics.median(max(map(end, step)) - begin for begin, step in found),
        "idle_us": statistics.median(idle for _, idle in results),
        "kernels": sorted((row for row in kernels if row["launches"]), key=lambda row: -float(row["us_a_step"])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--steps", default="decode", choices=("decode", "mixed"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    summary = summarise(options.trace, options.steps)
    print(f"step {summary['step_us']:.0f} us, of which nothing runs for {summary['idle_us']:.0f} us")
    for row in summary["kernels"]:
        print(f"{row['us_a_step']:9.1f} us {row['launches']:5.0f} x  {row['kernel']}")
    if options.out:
        options.out.write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    main()
