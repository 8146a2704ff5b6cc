from pathlib import Path

import pytest
import torch

from paceline import LLM
from paceline.lab.in_process import serve_stage
from paceline.lab.stage import PlannedRequest, Stage
from tiny_models import make_tiny

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("tiny")
    make_tiny(folder, "llama")
    with LLM(folder, device="cpu", threads=1) as llm:
        yield llm


def stage(requests: list[PlannedRequest], deadline_s: float = 60.0) -> Stage:
    return Stage("test", requests, {"kind": "test"}, deadline_s)


def test_requests_are_sent_when_due_and_every_token_is_timed(llm):
    requests = [PlannedRequest(i, 0.05 * i, [5, 6, 7 + i], 4) for i in range(4)]
    records = serve_stage(llm, stage(requests))
    for request, record in zip(requests, records, strict=True):
        assert record.ok
        assert record.finish == "length"
        assert record.sent is not None
        assert request.due <= record.sent
        assert record.output_tokens == record.expected_tokens == 4
        assert sum(tokens for _, tokens in record.deltas) == 4
        assert record.first is not None
        assert record.sent < record.first
        assert record.tpot is not None
        assert record.prompt_tokens == 3
    # A busy machine delays some; what is not sent when it is due delays all.
    assert min((record.sent or 9.0) - record.due for record in records) < 0.05


def test_the_tokens_of_a_step_have_one_time(llm):
    records = serve_stage(llm, stage([PlannedRequest(i, 0.0, [5, 6, 7 + i], 6) for i in range(4)]))
    first, *others = [[time for time, _ in record.deltas] for record in records]
    assert first[1:]
    # Requests that were let in with another step share all but their ends.
    assert all(len(set(first) & set(times)) >= 3 for times in others)


def test_a_seat_of_a_closed_loop_is_taken_when_it_is_free(llm):
    requests = [PlannedRequest(i, 0.0, [5, 6], 3, after=i - 2 if i >= 2 else None) for i in range(6)]
    records = serve_stage(llm, stage(requests))
    for i in range(2, 6):
        before = records[i - 2].ended
        assert before is not None
        assert records[i].due == pytest.approx(before)
        assert records[i].ok


def test_what_has_not_ended_at_the_deadline_has_failed(llm):
    requests = [PlannedRequest(0, 0.0, [5], 2), PlannedRequest(1, 0.0, [5], 10_000), PlannedRequest(2, 9.0, [5], 2)]
    limit = llm.limits.max_model_len
    requests[1] = PlannedRequest(1, 0.0, [5], limit - 1)
    records = serve_stage(llm, stage(requests, deadline_s=0.02))
    assert records[1].error == "the stage's deadline" or records[1].ok
    assert records[2].error == "never sent before the deadline"
    assert llm.core.stats.running == 0


def test_a_request_that_the_engine_refuses_fails_alone(llm):
    requests = [PlannedRequest(0, 0.0, [10**6], 2), PlannedRequest(1, 0.0, [5], 2)]
    refused, served = serve_stage(llm, stage(requests))
    assert refused.error is not None
    assert refused.ttft is None
    assert served.ok


def test_texts_are_refused(llm):
    with pytest.raises(ValueError, match="token ids"):
        serve_stage(llm, stage([PlannedRequest(0, 0.0, "text", 2)]))
