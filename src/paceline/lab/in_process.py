"""Carries out a stage on an engine in this process: no HTTP, no text, the same records."""

import time
from collections import defaultdict
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from paceline.engine.request import Request
from paceline.engine.sampling_params import SamplingParams
from paceline.lab.record import RequestRecord
from paceline.lab.stage import PlannedRequest, Stage
from paceline.llm import LLM


def serve_stage(llm: LLM, stage: Stage, on_progress: Callable[[int], None] | None = None) -> list[RequestRecord]:
    """Sends the stage's requests when they are due and waits for all answers, or for the deadline.

    A token's time is that at which the step that made it was read on the host.

    Args:
        on_progress: called after a request that ended, with how many have.

    Raises:
        ValueError: a prompt is not token ids, or needs another request's reply.
    """
    core = llm.core
    records = [
        RequestRecord(request.id, request.due, expected_tokens=request.output_tokens if stage.ignore_eos else None)
        for request in stage.requests
    ]
    ready: list[tuple[float, int]] = []
    followers: dict[int, list[PlannedRequest]] = defaultdict(list)
    for request in stage.requests:
        if request.needs or not isinstance(request.prompt, list):
            raise ValueError("an engine in this process takes token ids, and no turns that need a reply")
        if request.after is None:
            heappush(ready, (request.due, request.id))
        else:
            followers[request.after].append(request)
    ended, started = 0, time.perf_counter()

    def now() -> float:
        return time.perf_counter() - started

    def end(record: RequestRecord, error: str | None) -> None:
        nonlocal ended
        record.ended, record.error = now(), error
        ended += 1
        if on_progress is not None:
            on_progress(ended)
        for follower in followers.pop(record.id, ()):
            records[follower.id].due = record.ended + follower.due
            heappush(ready, (records[follower.id].due, follower.id))

    def send(request: PlannedRequest) -> None:
        record = records[request.id]
        prompt: list[int] = [id for id in request.prompt if isinstance(id, int)]
        params = _params(stage, request)
        record.prompt_tokens, record.sent, record.output_tokens = len(prompt), now(), 0
        try:
            core.limits.check(prompt, params)
        except ValueError as error:
            end(record, str(error))
            return
        core.add(Request(id=request.id, prompt=prompt, params=params, seed=0, priority=0, arrival=record.due))

    while (ready or core.has_work) and now() < stage.deadline_s:
        while ready and ready[0][0] <= now():
            send(stage.requests[heappop(ready)[1]])
        if not core.has_work:
            time.sleep(max(0.0, min(0.0005, ready[0][0] - now())) if ready else 0.0)
            continue
        outputs, read = core.step(), now()
        for output in outputs:
            record = records[output.request]
            record.cached_tokens = (record.cached_tokens or 0) + output.cached_tokens
            if output.ids:
                record.deltas.append((read, len(output.ids)))
                record.output_tokens = (record.output_tokens or 0) + len(output.ids)
            if output.finish is not None:
                record.finish = str(output.finish.value)
                end(record, output.error or None)
    for record in records:
        record.counted = True
        if record.ended is None:
            record.error = "the stage's deadline" if record.sent is not None else "never sent before the deadline"
            core.abort(record.id)
    while core.has_work:
        core.step()
    core.check_idle()
    return records


def _params(stage: Stage, request: PlannedRequest) -> SamplingParams:
    fields: dict[str, Any] = {"max_tokens": request.output_tokens, "ignore_eos": stage.ignore_eos, **stage.sampling}
    return SamplingParams(**fields)
