"""`/metrics`: the values, and that they can hurt nobody."""

import asyncio
import logging
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from running_server import Server, Start

from paceline.engine.output import Delta
from paceline.engine.request import CoreStats, Finish
from paceline.server import metrics as module
from paceline.server.metrics import Metrics

COMPLETIONS = "/v1/completions"


async def read(server: Server) -> dict[str, float]:
    text = (await server.http.get("/metrics")).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert all(sample.name.startswith("paceline_") for sample in samples)
    return {sample.name + "".join(f"[{v}]" for v in sample.labels.values()): sample.value for sample in samples}


async def test_what_is_counted(start: Start) -> None:
    server = await start(delay_s=0.002, eos_ids=(7,))
    prompt = [9] * 20
    body = {"prompt": prompt, "max_tokens": 10, "ignore_eos": True}
    await server.ok(COMPLETIONS, **body)
    await server.ok(COMPLETIONS, **body, n=3)
    await server.ok(COMPLETIONS, prompt="stop", max_tokens=100, stop=["e", "o", "a"], seed=9)
    await server.events(COMPLETIONS, prompt=[9], max_tokens=1, ignore_eos=True)
    assert (await server.post(COMPLETIONS, {})).status_code == 400
    values = await read(server)
    assert values["paceline_finished_total[length]"] == 5
    assert values["paceline_finished_total[stop]"] == 1
    assert values["paceline_refused_requests_total[400]"] == 1
    assert values["paceline_generation_tokens_total"] > 41
    assert values["paceline_prompt_tokens_total"] > 41
    assert values["paceline_prefix_hit_tokens_total"] >= 16
    assert values["paceline_prefix_query_tokens_total"] > values["paceline_prefix_hit_tokens_total"]
    for name in ("ttft", "e2e"):
        assert values[f"paceline_{name}_seconds_count"] == 6
    assert values["paceline_queue_seconds_count"] == 4
    assert values["paceline_tpot_seconds_count"] == 5, "not of the reply with one token"
    assert values["paceline_running"] == values["paceline_waiting"] == values["paceline_kv_used_ratio"] == 0
    assert values["paceline_open_requests"] == 0
    assert 0.002 * 9 * 4 < values["paceline_itl_seconds_sum"] < values["paceline_e2e_seconds_sum"]


async def test_while_requests_run(start: Start) -> None:
    server = await start(delay_s=0.05, max_num_seqs=2)
    body = {"prompt": "x", "max_tokens": 240, "ignore_eos": True}
    tasks = [asyncio.create_task(server.ok(COMPLETIONS, **body)) for _ in range(5)]
    values: dict[str, float] = {}
    async with asyncio.timeout(10):
        while [values.get(f"paceline_{name}") for name in ("running", "waiting", "open_requests")] != [2, 3, 5]:
            values = await read(server)
    assert 0 < values["paceline_kv_used_ratio"] < 1
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await server.idle()
    assert (await read(server))["paceline_finished_total[abort]"] == 5


def test_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """The definitions, against a clock that is set by hand."""
    clock = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: clock)
    metrics = Metrics()
    meter = metrics.request(100.0, [11], 1)
    for at, ids, finish in (
        (100.5, [1], None),
        (100.6, [2], None),
        (101.0, [3, 4], None),
        (101.2, [5], Finish.LENGTH),
    ):
        clock = at
        meter.delta(0, Delta(candidate=0, ids=ids, finish=finish, queued_s=0.25))
    meter.close("abort")

    def sums(name: str) -> tuple[float, float]:
        value = metrics.registry.get_sample_value
        return round(value(f"paceline_{name}_seconds_sum") or 0, 9), value(f"paceline_{name}_seconds_count") or 0

    assert sums("ttft") == (0.5, 1)
    assert sums("itl") == (0.1 + 0.4 / 2 + 0.2, 3)
    assert sums("tpot") == (round(0.7 / 4, 9), 1)
    assert sums("e2e") == (1.2, 1)
    assert sums("queue") == (0.25, 1)
    assert metrics.registry.get_sample_value("paceline_finished_total", {"reason": "length"}) == 1
    assert metrics.registry.get_sample_value("paceline_finished_total", {"reason": "abort"}) == 0


def test_a_counter_that_falls(caplog: pytest.LogCaptureFixture) -> None:
    """failure 80: a negative difference adds nothing, is logged, and counting goes on from there."""
    metrics = Metrics()
    hits = lambda: metrics.registry.get_sample_value("paceline_prefix_hit_tokens_total")  # noqa: E731
    metrics.update(CoreStats(prefix_hits=10))
    with caplog.at_level(logging.WARNING):
        metrics.update(CoreStats(prefix_hits=4))
    assert "prefix_hits fell from 10 to 4" in caplog.text
    assert hits() == 10
    metrics.update(CoreStats(prefix_hits=12))
    assert hits() == 12


async def test_broken_metrics_break_no_request(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """failure 80: whatever metrics raise, requests are served and places are given back."""

    def broken(*_: Any) -> None:
        raise ValueError("counters can only be incremented by non-negative amounts")

    for name in ("ttft", "itl", "queue_time", "e2e"):
        monkeypatch.setattr(getattr(server.service.metrics, name), "observe", broken)
    for name in ("generation_tokens", "prompt_tokens", "finished", "refused"):
        monkeypatch.setattr(getattr(server.service.metrics, name), "add", broken)
    await server.canary()
    await server.refused(COMPLETIONS, {})
    events = await server.events(COMPLETIONS, prompt="x", max_tokens=5, ignore_eos=True)
    assert len(events) == 5
    assert (await server.http.get("/metrics")).status_code == 200
    await server.idle()
