"""Work of steps, against rows followed by the fake runner."""

import random

import pytest

from fake_core import fake_core
from fake_runner import Done, FakeRunner
from paceline.engine.request import Request
from paceline.engine.sampling_params import SamplingParams
from paceline.engine.seated_rows import SeatedRows
from paceline.engine.step import RowStart, Step
from paceline.engine.step_time import StepWork


def work_of(runner: FakeRunner, step: Step, before: dict[int, int], result: Done) -> StepWork:
    """What the step did, from the fake runner's rows after it and their ``computed`` before it."""
    work = StepWork(rows=len(result.result().rows))
    starts = {start.row: start.computed for start in step.added}
    for row, state in runner.rows.items():
        first = starts.get(row, before.get(row, 0))
        count = state.computed - first
        work.tokens += count
        if count == 1:
            work.kv_tokens += state.computed
        else:
            work.prompt_pairs += sum(range(first + 1, state.computed + 1))
    return work


@pytest.mark.parametrize("depth", [1, 2])
def test_through_chunks_preemptions_and_prefix_hits(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    core = fake_core(num_blocks=24, max_num_batched_tokens=16, max_num_seqs=6, max_model_len=64, depth=depth)
    rows, submit, compared = SeatedRows(block_size=4), FakeRunner.submit, []

    def watched(self: FakeRunner, step: Step) -> Done:
        before = {row: state.computed for row, state in self.rows.items()}
        result = submit(self, step)
        work, sampled = rows.apply(step)
        assert work == work_of(self, step, before, result)
        assert {state.start.row for state in sampled} == set(result.result().rows)
        assert all(state.length == len(self.rows[state.start.row].tokens) for state in sampled)
        compared.append(work)
        return result

    monkeypatch.setattr(FakeRunner, "submit", watched)
    rng = random.Random(5)
    for number in range(40):
        prompt = [1] * rng.randint(1, 12) + [number] * rng.randint(1, 20)
        params = SamplingParams(max_tokens=rng.randint(1, 24))
        core.add(Request(id=number, prompt=prompt, params=params, seed=0, arrival=float(number)))
    while core.has_work:
        core.step()
    assert core.stats.preemptions > 0
    assert core.stats.prefix_hits > 0
    assert any(work.prompt_pairs for work in compared)
    assert sum(work.tokens for work in compared) == core.stats.step_tokens


def start(row: int, tokens: int, blocks: int) -> RowStart:
    return RowStart(row, [0] * tokens, tokens, 0, [[1] * blocks], SamplingParams(), 0, 0, [], None)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([Step(0), Step(2)], "out of order"),
        ([Step(0, added=[start(0, 2, 1)]), Step(1, added=[start(0, 2, 1)])], "added twice"),
        ([Step(0, added=[start(0, 5, 1)], advance={0: 5})], "no block"),
        ([Step(0, added=[start(0, 3, 2)], advance={0: 4})], "not known"),
        ([Step(0, added=[start(0, 4, 1)], advance={0: 4}), Step(1)], "no block"),
    ],
)
def test_wrong_steps_are_noticed(steps: list[Step], message: str) -> None:
    rows = SeatedRows(block_size=4)
    for step in steps[:-1]:
        rows.apply(step)
    with pytest.raises(AssertionError, match=message):
        rows.apply(steps[-1])
