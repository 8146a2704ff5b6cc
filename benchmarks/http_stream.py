"""How many tokens a second the HTTP server can stream, and what one chunk costs its processes.

    python benchmarks/http_stream.py --out benchmarks/results/http_stream.json

The engine is a fake core behind the real engine process: it gives every request one random token a step, with steps at
a fixed pace, so that the tokens a second that are offered are known. All requests of a run are sent at once as token
ids and stream the same number of tokens. The client uses raw sockets and only counts bytes: an event has two line feeds
and an HTTP chunk two carriage returns with theirs, so both are counted without parsing anything.

A server that cannot keep up puts several tokens into one event; ``tokens_per_event`` says so. ``us_per_event`` is the
processor time (user and system) of the processes that serve HTTP, from the first request to the last byte, divided by
the events; ``events_per_core_s`` is its inverse. Reading the requests is in it.

The processes that serve HTTP are pinned to ``--server-cores``, the client and the fake engine to ``--client-cores``.
Needs `psutil`.
"""

import argparse
import json
import os
import platform
import random
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from paceline.engine.config import EngineConfig
from paceline.engine.limits import Limits
from paceline.engine.request import CoreOutput, CoreStats, Finish, Request

PACE = "HTTP_STREAM_PACE"
"""Environment variable that tells the fake engine what to do."""
PACKAGES = ("fastapi", "httptools", "msgspec", "pyzmq", "starlette", "uvicorn", "uvloop")
SERVE = """
import os, sys
from paceline.engine.config import EngineConfig
from paceline.server.config import ServerConfig
from paceline.server.serve import serve
os.sched_setaffinity(0, eval(sys.argv[2]))
serve(EngineConfig(model=sys.argv[1]), ServerConfig(**eval(sys.argv[3])), core="http_stream:build")
"""


class PacedCore:
    """What the engine process needs of a core. Each step gives every request one token, ``rows / rate`` seconds after
    the step before."""

    def __init__(self, rate: float, vocab_size: int) -> None:
        self.limits = Limits(vocab_size, 1 << 20)
        self._rate = rate
        self._ids = [random.randrange(1000, vocab_size) for _ in range(1 << 16)]
        self._left: dict[int, int] = {}
        self._steps = 0
        self._next = 0.0

    def add(self, request: Request) -> None:
        assert request.params.max_tokens
        self._left[request.id] = request.params.max_tokens

    def abort(self, request: int, candidate: int | None = None) -> None:
        self._left.pop(request, None)

    def step(self) -> list[CoreOutput]:
        now = time.monotonic()
        self._next = max(self._next, now - 0.1) + len(self._left) / self._rate
        if self._next > now:
            time.sleep(self._next - now)
        self._steps += 1
        outputs = []
        for request, left in list(self._left.items()):
            output = CoreOutput(request=request, candidate=0, ids=[self._ids[(request * 31 + left) & 0xFFFF]])
            if left == 1:
                output.finish = Finish.LENGTH
                del self._left[request]
            else:
                self._left[request] = left - 1
            outputs.append(output)
        return outputs

    def idle(self) -> bool:
        return False

    @property
    def has_work(self) -> bool:
        return bool(self._left)

    @property
    def stats(self) -> CoreStats:
        return CoreStats(running=len(self._left), steps=self._steps)

    def check_idle(self) -> None:
        pass

    def close(self) -> None:
        pass


def build(config: EngineConfig, progress: Any) -> PacedCore:
    """The core, in the engine process."""
    pace = json.loads(os.environ[PACE])
    os.sched_setaffinity(0, pace["cores"])
    return PacedCore(pace["rate"], pace["vocab_size"])


@dataclass(frozen=True)
class Case:
    """One run."""

    streams: int
    prompt_tokens: int
    output_tokens: int
    rate: float
    """Tokens a second that the engine offers."""
    endpoint: str = "completions"


@dataclass
class Stream:
    sock: socket.socket
    line_feeds: int = 0
    returns: int = 0
    bytes: int = 0
    tail: bytes = b""


def drive(url: tuple[str, int], case: Case) -> tuple[float, list[Stream]]:
    """Sends all requests, reads all replies; seconds from the first request to the last byte, and the streams."""
    body: dict[str, Any] = {"max_tokens": case.output_tokens, "ignore_eos": True, "stream": True}
    if case.endpoint == "completions":
        body["prompt"] = [random.randrange(1000, 9000) for _ in range(case.prompt_tokens)]
    else:
        body["messages"] = [{"role": "user", "content": "word " * case.prompt_tokens}]
    path = "/v1/completions" if case.endpoint == "completions" else "/v1/chat/completions"
    payload = json.dumps(body).encode()
    request = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        f"Content-Length: {len(payload)}\r\n\r\n"
    ).encode() + payload
    streams = [Stream(socket.create_connection(url)) for _ in range(case.streams)]
    selector = selectors.EpollSelector()
    for stream in streams:
        selector.register(stream.sock, selectors.EVENT_READ, stream)
    began = time.monotonic()
    for stream in streams:
        stream.sock.sendall(request)
    open_streams = len(streams)
    while open_streams:
        for key, _ in selector.select():
            stream = key.data
            data = stream.sock.recv(1 << 16)
            if not data:
                selector.unregister(stream.sock)
                stream.sock.close()
                open_streams -= 1
                continue
            stream.bytes += len(data)
            stream.line_feeds += data.count(b"\n")
            stream.returns += data.count(b"\r")
            stream.tail = (stream.tail + data)[-64:]
    return time.monotonic() - began, streams


@contextmanager
def server(model: str, case: Case, options: argparse.Namespace) -> Iterator[subprocess.Popen[str]]:
    """A running server over the fake core."""
    pace = {"rate": case.rate, "cores": options.client_cores, "vocab_size": options.vocab_size}
    config = {"port": 0, "max_waiting": 1 << 16, "max_concurrent": 1 << 16}
    if options.api_processes > 1:
        config["api_processes"] = options.api_processes
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, model, repr(set(options.server_cores)), repr(config)],
        env={**os.environ, "PYTHONPATH": path, PACE: json.dumps(pace)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


def fronts(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes that serve HTTP: all but the engine."""
    everyone = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    return [each for each in everyone if "paceline.ipc.process" not in each.cmdline()]


def cpu_seconds(processes: list[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(each.user + each.system for each in times)


def measure(model: str, case: Case, options: argparse.Namespace) -> dict[str, Any]:
    with server(model, case, options) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        host, port = line.split("http://")[1].split("/")[0].rsplit(":", 1)
        url = (host, int(port))
        drive(url, Case(8, case.prompt_tokens, 8, 1.0, case.endpoint))  # Connections, imports, tables.
        front = fronts(process)
        before = cpu_seconds(front)
        wall, streams = drive(url, case)
        cpu = cpu_seconds(front) - before
    assert all(b"[DONE]" in stream.tail for stream in streams), "a stream broke off"
    events = sum((stream.line_feeds - stream.returns) // 2 - 1 for stream in streams)
    tokens = case.streams * case.output_tokens
    return {
        **asdict(case),
        "api_processes": options.api_processes,
        "wall_s": round(wall, 3),
        "tokens_per_s": round(tokens / wall),
        "events_per_s": round(events / wall),
        "tokens_per_event": round(tokens / events, 3),
        "bytes_per_event": round(sum(stream.bytes for stream in streams) / events),
        "front_cpu_s": round(cpu, 2),
        "us_per_event": round(cpu / events * 1e6, 1),
        "events_per_core_s": round(events / cpu),
    }


def machine() -> dict[str, Any]:
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), ": unknown")
    return {
        "cpu": cpu.split(":")[1].strip(),
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="whose tokenizer is used")
    parser.add_argument(
        "--vocab-size", type=int, default=49152, help="of the model; the fake engine draws ids below it"
    )
    parser.add_argument("--streams", type=int, default=1024)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--rates", type=float, nargs="+", default=[4000, 8000, 16000, 26000])
    parser.add_argument("--endpoint", choices=("completions", "chat"), default="completions")
    parser.add_argument("--api-processes", type=int, default=1)
    parser.add_argument("--server-cores", type=int, nargs="+", default=[0])
    parser.add_argument("--client-cores", type=int, nargs="+", default=[1])
    parser.add_argument("--label", default="", help="of this run in the result file")
    parser.add_argument("--commit", default="", help="what was measured")
    parser.add_argument("--out", type=Path, help="result file; the run is added to those that it has")
    options = parser.parse_args()
    os.sched_setaffinity(0, options.client_cores)
    load = os.getloadavg()[0]
    rows = []
    for rate in options.rates:
        case = Case(options.streams, options.prompt_tokens, options.output_tokens, rate, options.endpoint)
        rows.append(measure(options.model, case, options))
        print(json.dumps(rows[-1]), flush=True)
    if options.out is not None:
        run = {
            "label": options.label,
            "commit": options.commit,
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "command": " ".join(sys.argv),
            "load_average_before": round(load, 2),
            "machine": machine(),
            "rows": rows,
        }
        runs = json.loads(options.out.read_text()) if options.out.exists() else []
        options.out.write_text(json.dumps([*runs, run], indent=1) + "\n")


if __name__ == "__main__":
    main()
