"""`paceline serve --simulate` on one core, with its socket log: a real server whose engine is a clock."""

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.simulator.gpu_model import GpuModel

READY = b" at http://"


@dataclass
class ClockServer:
    url: str
    """Without ``/v1``."""
    lines: list[dict[str, Any]]
    """Of the socket log, in the order in which the replies ended; there once the server has ended."""


@contextmanager
def clock_server(core: int, model: GpuModel) -> Iterator[ClockServer]:
    """A running server, its engine process on the same core. Ends it with the context."""
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder, "model.json"), Path(folder, "socket.jsonl")
        model.save(path)
        command = ["taskset", "-c", str(core), sys.executable, "-m", "paceline", "serve", "--simulate", str(path)]
        command += ["--port", "0", "--socket-log", str(log), "--log-level", "warning"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            try:
                line = process.stdout.readline()
                if READY not in line:
                    raise RuntimeError("the clock server did not start")
                server = ClockServer("http://" + line.split(READY)[1].split(b"/v1")[0].decode(), [])
                yield server
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(60)
        server.lines += map(json.loads, log.read_text().splitlines())
