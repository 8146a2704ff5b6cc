"""From a client's log to the simulator and back."""

from paceline.engine.step_time import StepTime
from paceline.lab.client.log import StageLog
from paceline.lab.record import RequestRecord
from paceline.lab.simulated import observed, simulated_log
from paceline.lab.stage import PlannedRequest, Stage
from paceline.lab.target import Target
from paceline.simulator.gpu_model import EngineSizes, GpuModel
from paceline.simulator.simulate import simulate

MODEL = GpuModel(
    name="slow", step_time=StepTime(fixed_s=1.0), engine=EngineSizes(num_blocks=100, max_model_len=1024, depth=1)
)


def log(stage: Stage, records: list[RequestRecord]) -> StageLog:
    return StageLog(
        stage=stage,
        target=Target("t", "http://127.0.0.1:1", "m"),
        started_at="2026-01-01T00:00:00+00:00",
        records=records,
        client={},
        interrupted=False,
        machine={},
        command="",
    )


def test_observed() -> None:
    """A late send, a request that waits for another, one that was never sent, and one that failed on its way."""
    planned = [
        PlannedRequest(0, 0.0, [], 3, prompt_tokens=7),
        PlannedRequest(1, 0.0, [], 3, after=0),
        PlannedRequest(2, 1.0, [], 5, prompt_tokens=4),
        PlannedRequest(3, 2.0, [], 6, prompt_tokens=9),
        PlannedRequest(4, 0.0, [], 2, prompt_tokens=3, after=3),
    ]
    records = [
        RequestRecord(0, 0.0, sent=0.5, deltas=[(1.5, 1), (3.5, 2)], ended=3.6, prompt_tokens=8, output_tokens=3),
        RequestRecord(1, 3.6, sent=4.0, deltas=[(5.0, 1)], ended=5.0, prompt_tokens=2, output_tokens=1),
        RequestRecord(2, 1.0, error="not sent"),
        RequestRecord(3, 2.0, sent=2.0, error="status 500"),
        RequestRecord(4, 9.0, sent=9.0, error="status 500"),
    ]
    found = observed(log(Stage("s", planned, {}, 60.0), records))
    assert [(s.request.due, len(s.request.prompt), s.request.output_tokens, s.request.after) for s in found] == [
        (0.5, 8, 3, None),
        (0.5, 2, 1, 0),
        (2.0, 9, 6, None),
        (9.0, 3, 2, None),
    ]
    assert [(s.ttft_s, s.tpot_s) for s in found] == [(1.0, 1.0), (1.0, None), (None, None), (None, None)]
    assert len({tuple(s.request.prompt) for s in found}) == 4


def test_there_and_back() -> None:
    """The log of a simulation, simulated again, is the same."""
    planned = [
        PlannedRequest(0, 0.25, [], 3, prompt_tokens=8),
        PlannedRequest(1, 1.0, [], 2, prompt_tokens=5),
        PlannedRequest(2, 2.0, [], 600, prompt_tokens=500),
    ]
    stage = Stage("s", planned, {}, 60.0)
    seen = [PlannedRequest(p.id, p.due, [], p.output_tokens, p.prompt_tokens, p.after) for p in stage.requests]
    records = [RequestRecord(p.id, p.due, sent=p.due, prompt_tokens=p.prompt_tokens) for p in seen]
    requests = [each.request for each in observed(log(stage, records))]
    made = simulated_log(stage, simulate(requests, MODEL), MODEL, "command")
    first, second, long = made.records
    assert first.deltas == [(1.25, 1), (2.25, 1), (3.25, 1)]
    assert (second.ttft, second.tpot, second.ok) == (1.25, 1.0, True)
    assert not long.ok
    again = observed(made)
    assert [each.request for each in again] == requests
    assert [each.ttft_s for each in again] == [1.0, 1.25, None]
