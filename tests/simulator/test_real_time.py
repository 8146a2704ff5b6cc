"""The clock server in real time against the simulation of the same requests, and the load client against its log."""

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, quantiles

import pytest
from gpu_models import gpu_model

from paceline.engine.step_log import read_step_log
from paceline.lab.client.log import read_log
from paceline.lab.client.run import run_stage
from paceline.lab.stage import PlannedRequest, Stage
from paceline.lab.target import Target
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
            status = server.wait(60)
    assert status == 0


@contextmanager
def lateness() -> Iterator[list[float]]:
    """By how many seconds sleeps end late meanwhile: what a busy machine does to any program."""
    found: list[float] = []
    over = threading.Event()

    def sample() -> None:
        while not over.is_set():
            due = time.monotonic() + 0.005
            time.sleep(0.005)
            found.append(time.monotonic() - due)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(sample)
        try:
            yield found
        finally:
            over.set()


def tail(values: list[float]) -> list[float]:
    """Median and 90th percentile."""
    cuts = quantiles(values, n=10)
    return [cuts[4], cuts[8]]


def test_percentiles_agree_with_the_simulation_and_the_load_client_with_the_log(tmp_path: Path) -> None:
    rng = random.Random(3)
    due, requests = 0.0, []
    for i in range(80):
        prompt = trace_prompt(i, 1, (i,), 1) * rng.randint(20, 400)
        requests.append(PlannedRequest(i, due, prompt, rng.randint(6, 20)))
        due += rng.expovariate(25)
    stage = Stage("slice", requests, {"kind": "poisson", "rate": 25.0}, 30.0)
    with clock_server(tmp_path) as port, lateness() as late:
        run_stage(Target("clock", f"http://127.0.0.1:{port}", "smollm2"), stage, tmp_path / "log", workers=1)
    log = read_log(tmp_path / "log")
    assert log.clock_start is not None
    lines = [json.loads(line) for line in (tmp_path / "socket.jsonl").read_text().splitlines()]
    # Without the client's question which fields the server takes.
    served = sorted(
        (line for line in lines if line["arrived"] > log.clock_start), key=lambda line: float(line["arrived"])
    )
    assert [line["completion_tokens"] for line in served] == [request.output_tokens for request in requests]
    if mean(late) > 0.001:
        pytest.skip(f"SKIPPED: sleeps end {mean(late) * 1e3:.1f} ms late on this machine, and steps take some 10 ms")
    start = served[0]["arrived"]
    outcomes = simulate(
        [
            SimulatedRequest(line["arrived"] - start, request.prompt, request.output_tokens)
            for line, request in zip(served, requests, strict=True)
        ],
        MODEL,
    )
    ttft = [line["first"] - line["arrived"] for line in served]
    tpot = [(line["last"] - line["first"]) / (line["completion_tokens"] - 1) for line in served]
    for seen, true in (("ttft_from_send", ttft), ("tpot", tpot)):
        assert mean(getattr(record, seen) for record in log.records) == pytest.approx(mean(true), rel=0.05)
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
    assert sum(step.work.rows for step in steps) == sum(request.output_tokens for request in requests) + 1
    assert abs(mean(step.seconds / MODEL.step_time.seconds(step.work) - 1 for step in steps)) < 0.03
