"""The clock server in real time against the simulation of the same requests."""

import asyncio
import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, quantiles
from typing import Any

import pytest
from gpu_models import gpu_model

from paceline.engine.step_log import read_step_log
from paceline.simulator.simulate import SimulatedRequest, simulate, trace_prompt

MODEL = gpu_model(
    fixed_s=0.006,
    weights_s=0.002,
    token_s=1e-4,
    row_s=5e-4,
    kv_token_s=1e-6,
    pair_s=1e-7,
    request_s=0.004,
    sizes={"max_num_batched_tokens": 512, "max_num_seqs": 12, "depth": 2},
)
"""Twelve rows and a queue, so that more than one request at a time matters."""


@contextmanager
def clock_server(tmp_path: Path) -> Iterator[int]:
    """Port of a server; ends it afterwards, and expects that it ended well."""
    MODEL.save(tmp_path / "model.json")
    options = ["--simulate", "model.json", "--port", "0", "--socket-log", "socket.jsonl", "--step-log", "steps.jsonl"]
    command = [sys.executable, "-m", "paceline", "serve", *options, "--log-level", "warning"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as server:
        assert server.stdout is not None
        try:
            yield int(server.stdout.readline().split("/v1")[0].rsplit(":", 1)[1])
        finally:
            server.send_signal(signal.SIGTERM)
            status = server.wait(20)
    assert status == 0


async def stream(port: int, number: int, delay: float, prompt: list[int], output: int) -> None:
    await asyncio.sleep(delay)
    body = json.dumps(
        {
            "prompt": prompt,
            "max_tokens": output,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: {number}\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
    reply = await reader.read()
    assert b"data: [DONE]" in reply
    writer.close()


def tail(values: list[float]) -> list[float]:
    """Median and 90th percentile."""
    cuts = quantiles(values, n=10)
    return [cuts[4], cuts[8]]


async def test_percentiles_agree_with_the_simulation(tmp_path: Path) -> None:
    rng = random.Random(3)
    dues, sizes = [0.0], []
    for _ in range(80):
        dues.append(dues[-1] + rng.expovariate(25))
        sizes.append((rng.randint(20, 400), rng.randint(6, 20)))
    with clock_server(tmp_path) as port:
        await stream(port, 1000, 0.0, [5] * 10, 4)
        work = enumerate(zip(dues, sizes, strict=False))
        await asyncio.gather(*(stream(port, i, due, trace_prompt(i, 1, (i,), 1) * n, m) for i, (due, (n, m)) in work))
    lines = [json.loads(line) for line in (tmp_path / "socket.jsonl").read_text().splitlines()]
    seen: dict[int, dict[str, Any]] = {int(line["id"]): line for line in lines}
    assert all(seen[i]["completion_tokens"] == m for i, (_, m) in enumerate(sizes))
    start = min(line["arrived"] for line in seen.values())
    planned = [SimulatedRequest(seen[i]["arrived"] - start, [i] * n, m) for i, (n, m) in enumerate(sizes)]
    outcomes = simulate(planned, MODEL)
    served = [seen[i] for i in range(len(sizes))]
    ttft = [line["first"] - line["arrived"] for line in served]
    tpot = [(line["last"] - line["first"]) / (line["completion_tokens"] - 1) for line in served]
    simulated = [outcome.ttft for outcome in outcomes]
    assert min(ttft) > 0
    assert mean(ttft) == pytest.approx(mean(simulated), rel=0.1)
    assert tail(ttft) == pytest.approx(tail(simulated), rel=0.15)
    simulated = [outcome.tpot for outcome in outcomes]
    assert mean(tpot) == pytest.approx(mean(simulated), rel=0.05)
    assert tail(tpot) == pytest.approx(tail(simulated), rel=0.1)
    # The queue is a large part of it.
    assert mean(ttft) > 1.5 * mean(outcome.first - outcome.scheduled for outcome in outcomes)
    steps = read_step_log(tmp_path / "steps.jsonl")
    assert sum(step.work.rows for step in steps) == sum(m for _, m in sizes) + 4
    assert abs(mean(step.seconds / MODEL.step_time.seconds(step.work) - 1 for step in steps)) < 0.03
