"""`paceline serve --simulate` on given cores, with its socket log: a real server whose engine is a clock.

Needs `psutil`.
"""

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from paceline.simulator.gpu_model import GpuModel

READY = b" at http://"


@dataclass
class ClockServer:
    url: str
    """Without ``/v1``."""
    processes: list[psutil.Process]
    """HTTP and engine."""
    lines: list[dict[str, Any]] = field(default_factory=list)
    """Of the socket log, in the order in which the replies ended; there once the server has ended."""

    def cpu_seconds(self) -> float:
        """Processor time so far, user and system."""
        times = [process.cpu_times() for process in self.processes]
        return sum(each.user + each.system for each in times)


@contextmanager
def clock_server(cores: Sequence[int], model: GpuModel) -> Iterator[ClockServer]:
    """A running server, HTTP and engine process on ``cores``. Ends it with the context."""
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder, "model.json"), Path(folder, "socket.jsonl")
        model.save(path)
        command = [
            "taskset",
            "-c",
            ",".join(map(str, cores)),
            sys.executable,
            "-m",
            "paceline",
            "serve",
            "--simulate",
            str(path),
        ]
        command += ["--port", "0", "--socket-log", str(log), "--log-level", "warning"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            try:
                line = process.stdout.readline()
                if READY not in line:
                    raise RuntimeError("the clock server did not start")
                parent = psutil.Process(process.pid)
                url = "http://" + line.split(READY)[1].split(b"/v1")[0].decode()
                server = ClockServer(url, [parent, *parent.children(recursive=True)])
                yield server
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(60)
        server.lines += map(json.loads, log.read_text().splitlines())
