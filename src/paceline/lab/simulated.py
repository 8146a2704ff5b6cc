"""Between logs of a client and the simulator."""

from collections.abc import Sequence
from datetime import UTC, datetime

from paceline.lab.client.log import StageLog
from paceline.lab.record import RequestRecord
from paceline.lab.stage import Stage
from paceline.lab.target import Target
from paceline.simulator.fit_log import Observed
from paceline.simulator.gpu_model import GpuModel
from paceline.simulator.simulate import Outcome, SimulatedRequest, trace_prompt


def observed(log: StageLog) -> list[Observed]:
    """The requests of a stage as the simulator takes them, with what the client saw of each.

    A request is due when the client turned to it in fact: the client's lateness is not the engine's. One that waited
    for another is sent as long after that one's last token as it was in fact. Requests that were never sent are left
    out; what failed later was a load all the same, of the tokens that were asked for. The log has no prompts, so none
    share a prefix.
    """
    planned = {request.id: request for request in log.stage.requests}
    records = [record for record in log.records if record.sent is not None]
    place = {record.id: index for index, record in enumerate(records)}
    found = []
    for index, record in enumerate(records):
        plan = planned[record.id]
        assert record.begun is not None
        size = record.prompt_tokens or plan.prompt_tokens or 1
        due, after = record.begun, None
        if plan.after in place and (end := records[place[plan.after]].last) is not None:
            due, after = max(0.0, record.begun - end), place[plan.after]
        request = SimulatedRequest(due, trace_prompt(index, size), record.output_tokens or plan.output_tokens, after)
        found.append(Observed(request, record.ttft_from_send, record.tpot))
    return found


def simulated_log(stage: Stage, outcomes: Sequence[Outcome], model: GpuModel, command: str = "") -> StageLog:
    """A simulation as the log of a client that sends in time and sees every token at once.

    Args:
        stage: with a known ``prompt_tokens`` in every request.
        outcomes: one a request.
    """
    records = [
        RequestRecord(
            request.id,
            request.due if outcome.due is None else outcome.due,
            sent=outcome.due,
            headers=outcome.first,
            deltas=outcome.tokens,
            counted=True,
            ended=outcome.last,
            prompt_tokens=request.prompt_tokens,
            output_tokens=len(outcome.tokens),
            cached_tokens=outcome.cached_tokens,
            expected_tokens=request.output_tokens,
            status=None if outcome.error else 200,
            finish=None if outcome.error else "length",
            error=outcome.error,
        )
        for request, outcome in zip(stage.requests, outcomes, strict=True)
    ]
    return StageLog(
        stage=stage,
        target=Target(name=f"simulated {model.name}", url="", model=model.name),
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        records=records,
        client={},
        interrupted=False,
        machine={},
        command=command,
    )
