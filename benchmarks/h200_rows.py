"""The result file of `h200.py`: one line of JSON a row, and which lines of the engine's step log a row is made of."""

import json
import platform
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from paceline import LLM


def git_commit() -> str:
    run = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return run.stdout.strip() or "unknown"


def package(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "source"


def engine_sizes(llm: LLM) -> dict[str, int]:
    """What a simulation must know of this engine: the fields of `EngineSizes`."""
    scheduler = llm.core._scheduler
    return {
        "block_size": scheduler.kv.block_size,
        "num_blocks": scheduler.kv.pools[0].capacity + 1,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_model_len": scheduler.max_model_len,
        "depth": llm.core._depth,
    }


@dataclass
class Results:
    """Writes rows as they come.

    Attributes:
        step_log: of the engine that runs now; None: it has none.
    """

    file: Path
    commit: str
    step_logs: Path | None = None
    """Folder for the logs of all engines."""
    mode: str = ""
    flags: dict[str, Any] = field(default_factory=dict)
    step_log: Path | None = None

    def add(self, **row: Any) -> None:
        full = {"engine": "paceline", "mode": self.mode, **row, "flags": self.flags, "commit": self.commit}
        line = json.dumps(full)
        print(line, flush=True)
        with self.file.open("a") as out:
            out.write(line + "\n")

    def begin_engine(self, mode: str, flags: dict[str, Any]) -> str | None:
        """Rows that follow are of this engine; returns where it logs its steps."""
        self.mode, self.flags = mode, flags
        if self.step_logs is None:
            return None
        number = 1 + sum(1 for _ in self.step_logs.glob("*.jsonl"))
        knobs = "".join(f"-{knob}-{value}" for knob, value in flags.items())
        self.step_log = self.step_logs / f"{number}-{mode}{knobs}.jsonl"
        return str(self.step_log)

    def logged(self, llm: LLM) -> int:
        """Lines that the step log has now, when the engine is idle."""
        if self.step_log is None:
            return 0
        llm.core.idle()  # writes what is still held back
        with self.step_log.open("rb") as lines:
            return sum(1 for _ in lines)

    def steps(self, llm: LLM, begin: int) -> dict[str, Any]:
        """Keys of a row that was measured with a step log: its file, and that its lines from ``begin`` on are the
        row's."""
        if self.step_log is None:
            return {}
        return {"step_log": self.step_log.name, "steps": [begin, self.logged(llm)]}

    def machine(self) -> None:
        driver = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        )
        self.add(
            kind="machine",
            gpu=torch.cuda.get_device_name(),
            driver=driver.stdout.strip(),
            torch=torch.__version__,
            triton=package("triton"),
            cuda=torch.version.cuda,
            python=platform.python_version(),
            command=" ".join(["python", "benchmarks/h200.py", *sys.argv[1:]]),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
        )
