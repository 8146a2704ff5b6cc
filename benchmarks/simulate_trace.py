"""How long `paceline simulate` takes for a trace, and what it reports.

    python benchmarks/simulate_trace.py TRACE --out benchmarks/results/simulate_trace.json

Runs the command ``--runs`` times in a process of its own, as a user does: start, reading the trace and the report are
in the time. ``wall_s`` and ``cpu_s`` have every run. An entry is appended to ``--out``.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

SLO = "ttft_p99<1s, tpot_mean<20ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--gpu-model", default="h200-llama3-8b-fp8kv")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    wall, cpu = [], []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        arguments = [str(options.trace), "--gpu-model", options.gpu_model, "--slo", SLO]
        for _ in range(options.runs):
            before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            command = [sys.executable, "-m", "paceline", "simulate", *arguments, "--json", str(out)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            wall.append(round(time.perf_counter() - began, 2))
            cpu.append(round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 2))
        point = json.loads(out.read_text())["points"][0]
    entry = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"paceline simulate {options.trace.name} --gpu-model {options.gpu_model} --slo '{SLO}'",
        "machine": {
            "cores": os.cpu_count(),
            "platform": platform.platform(),
            "python": platform.python_version(),
            "load_average": round(os.getloadavg()[0], 2),
        },
        "wall_s": wall,
        "cpu_s": cpu,
        "requests": point["requests"],
        "output_tokens": point["output_tokens"],
        "simulated_s": point["window_s"],
        "goodput_rps": point["goodput_rps"],
        "ttft_s": point["ttft_s"],
        "tpot_s": point["tpot_s"],
    }
    entries = json.loads(options.out.read_text()) if options.out.exists() else []
    options.out.write_text(json.dumps([*entries, entry], indent=1) + "\n")
    print(json.dumps(entry, indent=1))


if __name__ == "__main__":
    main()
