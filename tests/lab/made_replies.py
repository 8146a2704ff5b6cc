"""Logs of stages whose times are written by hand."""

from collections.abc import Sequence
from typing import Any

from paceline.lab.client.log import StageLog
from paceline.lab.record import RequestRecord
from paceline.lab.stage import PlannedRequest, Stage
from paceline.lab.target import Target


def reply(id: int, due: float, deltas: Sequence[tuple[float, int]], **more: Any) -> RequestRecord:
    """Sent when due, all tokens counted by the server, ended with the last delta; ``more`` changes that."""
    tokens = sum(count for _, count in deltas)
    fields = {
        "sent": due,
        "counted": True,
        "ended": deltas[-1][0] if deltas else due,
        "output_tokens": tokens,
        "expected_tokens": tokens,
    } | more
    return RequestRecord(id, due, deltas=list(deltas), **fields)


def steady(id: int, due: float, ttft: float = 0.1, tpot: float = 0.01, tokens: int = 8, **more: Any) -> RequestRecord:
    return reply(id, due, [(due + ttft + tpot * place, 1) for place in range(tokens)], **more)


def log_of(
    records: list[RequestRecord],
    *,
    load: dict[str, Any] | None = None,
    offered_rate: float | None = None,
    batch: int | None = None,
    interrupted: bool = False,
    client: dict[str, float] | None = None,
    requests: list[PlannedRequest] | None = None,
) -> StageLog:
    if requests is None:
        requests = [PlannedRequest(record.id, record.due, [], record.expected_tokens or 1) for record in records]
    return StageLog(
        stage=Stage("stage", requests, load or {"kind": "burst"}, 60.0, offered_rate=offered_rate, batch=batch),
        target=Target("engine", "http://127.0.0.1:8000", "model", api_key=None),
        started_at="2026-11-30T12:00:00+00:00",
        records=records,
        client={"workers": 1, "loop_delay_p99_s": 0.0001, "cpu": 0.2} if client is None else client,
        interrupted=interrupted,
        machine={},
        command="",
    )


def open_loop(count: int, rate: float, *, kind: str = "constant", **more: Any) -> StageLog:
    """Requests at equal distances, each answered as all others; ``more`` goes to `steady`."""
    records = [steady(id, id / rate, **more) for id in range(count)]
    return log_of(records, load={"kind": kind, "rate": rate}, offered_rate=rate)
