"""Points, results and logs with made-up figures, for tests of what reads them."""

import random
from dataclasses import replace
from typing import Any

from paceline.lab.client.log import StageLog
from paceline.lab.point import Counts, Point, Statistics
from paceline.lab.record import RequestRecord
from paceline.lab.results import MeasuredTarget, Results
from paceline.lab.slo import parse_constraints
from paceline.lab.stage import Stage
from paceline.lab.target import Target

SLO = "ttft_p99 < 1s, tpot_p99 < 20ms"
NONE = Statistics(None, None, None, None, None, None)
MACHINE = {"cpu": "Example CPU", "cores": 16, "gpus": ["NVIDIA H200"], "python": "3.11.4"}


def statistics(p50: float, p99: float) -> Statistics:
    """Between the two as a line would have it; the mean lies a little above the median."""
    slope = (p99 - p50) / 49
    return Statistics(p50 * 1.05, p50, p50 + 40 * slope, p50 + 45 * slope, p99, p99 * 1.1)


def point(
    target: str = "paceline",
    *,
    rate: float | None = None,
    batch: int | None = None,
    name: str | None = None,
    ttft: tuple[float, float] | None = (0.1, 0.3),
    tpot: tuple[float, float] | None = (0.010, 0.015),
    requests: int = 512,
    requests_per_s: float = 1.0,
    tokens: int = 128,
    slo: str = SLO,
    **more: Any,
) -> Point:
    """(p50, p99) of the latencies in seconds; ``tokens`` a request. With latencies None nothing was measured."""
    measured = {"ttft": ttft, "tpot": tpot}
    found = {metric: NONE if pair is None else statistics(*pair) for metric, pair in measured.items()}
    constraints = parse_constraints(slo)
    kept = {item.text: item.keeps(item.value_of(found.get(item.metric, NONE))) for item in constraints}
    share = 0.995 if all(kept.values()) else 0.7
    ok = requests if ttft is not None else 0
    load = (
        {"kind": "poisson", "rate": rate}
        if rate
        else {"kind": "concurrency", "batch": batch}
        if batch
        else {"kind": "burst"}
    )
    fields: dict[str, Any] = {
        "name": name or (f"rate={rate:g}" if rate else f"batch={batch}" if batch else "128x128"),
        "target": target,
        "load": load,
        "offered_rate": rate,
        "achieved_rate": rate and rate * 0.998,
        "batch": batch,
        "batch_kind": "client" if batch else None,
        "valid": True,
        "reasons": [],
        "requests": Counts(requests, ok, requests - ok),
        "ttft_s": found["ttft"],
        "ttft_from_send_s": found["ttft"],
        "tpot_s": found["tpot"],
        "itl_s": found["tpot"],
        "e2e_s": NONE
        if ttft is None or tpot is None
        else statistics(ttft[0] + tokens * tpot[0], ttft[1] + tokens * tpot[1]),
        "output_tokens": ok * tokens,
        "prompt_tokens": ok * 2048,
        "window_s": requests / requests_per_s if ok else None,
        "output_tokens_per_s": requests_per_s * tokens if ok else None,
        "requests_per_s": requests_per_s if ok else None,
        "goodput_rps": requests_per_s * share if ok and constraints else None,
        "attainment": share if ok and constraints else None,
        "attainment_interval": (share - 0.02, min(1.0, share + 0.01)) if ok and constraints else None,
        "effective_requests": float(requests) if ok and constraints else None,
        "constraints": kept,
    }
    return Point(**(fields | more))


def rate_sweep(target: str, rates: list[float], limit: float, slo: str = SLO) -> list[Point]:
    """Keeps `SLO` up to ``limit`` requests/s; queues grow above it."""
    found = []
    for rate in rates:
        busy = rate / limit
        ttft = 0.08 / max(0.04, 1.15 - busy) if busy < 1.1 else 1.5 + 4 * (busy - 1)
        tpot = 0.007 + 0.008 * min(busy, 1.4)
        found.append(
            point(
                target,
                rate=rate,
                ttft=(ttft, ttft * (1.6 if busy <= 1 else 3)),
                tpot=(tpot, tpot * (1.2 if busy <= 1 else 1.8)),
                requests_per_s=min(rate, limit * 1.05) * 0.97,
                slo=slo,
            )
        )
    return found


def invalid(measured: Point, *reasons: str) -> Point:
    return replace(measured, valid=False, reasons=list(reasons))


def results(
    points: list[Point],
    *,
    experiment: str = "chat",
    slo: str = SLO,
    started_at: str = "2026-11-30T12:00:00+00:00",
    **more: Any,
) -> Results:
    names = list(dict.fromkeys(item.target for item in points))
    targets = [
        MeasuredTarget(
            name=name,
            url=f"http://127.0.0.1:800{place}",
            model="example/model-8b",
            command=[name, "serve", "example/model-8b"],
            info={"version": f"1.{place}"},
        )
        for place, name in enumerate(names)
    ]
    fields: dict[str, Any] = {
        "experiment": experiment,
        "started_at": started_at,
        "targets": targets,
        "machine": MACHINE,
        "commands": ["paceline bench rate --url http://127.0.0.1:8000 --rates 1,3,5,6,7"],
        "constraints": [item.text for item in parse_constraints(slo)],
        "points": points,
    }
    return Results(**(fields | more))


def log(
    target: str = "paceline", *, stage: str = "rate=3", count: int = 200, rate: float = 3.0, failed: int = 0
) -> StageLog:
    """Poisson arrivals; a stall of the server in the middle; the last ``failed`` requests fail."""
    draw = random.Random(stage + target)
    records, due = [], 0.0
    for id in range(count):
        due += draw.expovariate(rate)
        first = due + 0.1 + 0.1 * draw.random() + (2.0 if abs(id - count // 2) < 4 else 0.0)
        gap = 0.01 + 0.002 * draw.random()
        records.append(
            RequestRecord(
                id,
                due,
                sent=due + 0.001,
                deltas=[(first + gap * step, 1) for step in range(128)],
                counted=True,
                ended=first + gap * 128,
                output_tokens=128,
                prompt_tokens=2048,
                error="HTTP 503" if id >= count - failed else None,
            )
        )
    return StageLog(
        stage=Stage(stage, [], {"kind": "poisson", "rate": rate}, 3600.0, offered_rate=rate),
        target=Target(target, "http://127.0.0.1:8000", "example/model-8b"),
        started_at="2026-11-30T12:01:00+00:00",
        records=records,
        client={},
        interrupted=False,
        machine=MACHINE,
        command="paceline bench rate",
    )
