"""The clock runner behind a scheduler: same steps as any runner, and what it says."""

import random
import time

import pytest

from fake_runner import FakeRunner
from paceline.engine.engine_core import EngineCore
from paceline.engine.limits import Limits
from paceline.engine.request import CoreOutput, Finish, Request
from paceline.engine.sampling_params import SamplingParams
from paceline.engine.scheduler import Scheduler
from paceline.engine.step import KVGroup, Runner, Step
from paceline.engine.step_time import StepTime
from paceline.simulator.clock import Clock, RealClock, VirtualClock
from paceline.simulator.clock_runner import ClockRunner

GROUPS = [KVGroup(None, 24)]
WORDS = (10, 11, 12, 13)


def core_of(runner: Runner, depth: int = 1, eos_ids: tuple[int, ...] = ()) -> EngineCore:
    scheduler = Scheduler(
        GROUPS,
        block_size=4,
        max_num_batched_tokens=16,
        max_num_seqs=6,
        max_rows=12,
        max_model_len=64,
        eos_ids=eos_ids,
        prefix_cache=False,
    )
    return EngineCore(scheduler, runner, depth, Limits(97, 64))


def clock_runner(clock: Clock | None = None, **coefficients: float) -> ClockRunner:
    return ClockRunner(StepTime(**coefficients), clock or VirtualClock(), GROUPS, 4, WORDS)


def run(core: EngineCore) -> dict[tuple[int, int], list[CoreOutput]]:
    outputs: dict[tuple[int, int], list[CoreOutput]] = {}
    while core.has_work:
        for output in core.step():
            outputs.setdefault((output.request, output.candidate), []).append(output)
    core.check_idle()
    return outputs


def request(number: int, prompt: int, **params) -> Request:
    seed = params.pop("seed_of_request", 0)
    return Request(id=number, prompt=[number] * prompt, params=SamplingParams(**params), seed=seed, arrival=0.0)


def ids(outputs: list[CoreOutput]) -> list[int]:
    return [token for output in outputs for token in output.ids]


@pytest.mark.parametrize("depth", [1, 2])
def test_the_same_steps_as_with_a_runner_that_checks_everything(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that end by length: what is sampled cannot change what is scheduled, so the steps are equal."""
    seen: dict[type, list[Step]] = {FakeRunner: [], ClockRunner: []}
    for kind in seen:

        def watched(self, step, *, submit=kind.submit, steps=seen[kind]):
            # Rows resume with what was sampled before a preemption, which differs.
            for start in step.added:
                start.tokens = [0] * len(start.tokens)
            steps.append(step)
            return submit(self, step)

        monkeypatch.setattr(kind, "submit", watched)
        core = core_of(FakeRunner(GROUPS) if kind is FakeRunner else clock_runner(fixed_s=1.0), depth)
        rng = random.Random(7)
        for number in range(30):
            core.add(request(number, rng.randint(1, 30), max_tokens=rng.randint(1, 30)))
        run(core)
        assert core.stats.preemptions > 0
    assert len(seen[FakeRunner]) > 50
    assert seen[FakeRunner] == seen[ClockRunner]


def test_a_token_depends_on_seed_candidate_and_position_alone() -> None:
    alone = core_of(clock_runner())
    alone.add(request(1, 5, max_tokens=9, seed_of_request=-3))
    expected = ids(run(alone)[1, 0])
    assert set(expected) == set(WORDS)
    crowded = core_of(clock_runner(), depth=2)
    for number in range(8):
        crowded.add(request(number, 5, max_tokens=9, n=2, seed_of_request=number - 4))
    outputs = run(crowded)
    assert ids(outputs[1, 0]) == expected
    assert ids(outputs[1, 1]) == ids(outputs[2, 0]) != expected


def test_ends_by_length_alone_unless_only_ends_are_allowed() -> None:
    core = core_of(clock_runner(), eos_ids=(11,))
    core.add(request(1, 3, max_tokens=20))
    core.add(request(2, 3, max_tokens=20, ignore_eos=True))
    core.add(request(3, 3, max_tokens=20, allowed_token_ids=[50, 51]))
    core.add(request(4, 3, max_tokens=20, allowed_token_ids=[11]))
    core.add(request(5, 3, max_tokens=20, stop_token_ids=[10, 12]))
    outputs = run(core)
    said = {number: ids(outputs[number, 0]) for number in range(1, 6)}
    assert {number: set(found) for number, found in said.items()} == {
        1: {10, 12, 13},
        2: set(WORDS),
        3: {50, 51},
        4: {11},
        5: {13},
    }
    assert [len(said[number]) for number in range(1, 6)] == [20, 20, 20, 1, 20]
    assert outputs[4, 0][-1].finish is Finish.STOP


def test_log_probabilities_fail_their_request_alone() -> None:
    core = core_of(clock_runner(), depth=2)
    core.add(request(1, 3, max_tokens=4, logprobs=1))
    core.add(request(2, 3, max_tokens=4, prompt_logprobs=0))
    core.add(request(3, 3, max_tokens=4))
    outputs = run(core)
    for number in (1, 2):
        assert [output.finish for output in outputs[number, 0]] == [Finish.ERROR]
        assert "log-probabilities" in outputs[number, 0][0].error
    assert len(ids(outputs[3, 0])) == 4


def test_steps_queue_on_the_device() -> None:
    clock = VirtualClock()
    runner = clock_runner(clock, fixed_s=1.0)
    core = core_of(runner, depth=2)
    core.add(request(1, 3, max_tokens=3))
    ends = []
    while core.has_work:
        if core.step():
            ends.append(clock.now())
    assert ends == [1.0, 2.0, 3.0]
    clock.wait_until(10.0)
    core.add(request(2, 3, max_tokens=1))
    while core.has_work:
        core.step()
    assert clock.now() == 11.0


def test_real_time() -> None:
    """16 steps of 20 ms: none ends early, and lateness does not add up with two under way: some of the last ends are
    as prompt as those of the first. Other work on the machine may make the next step be asked for too late, so some
    runs may differ."""

    def growth() -> float:
        core = core_of(clock_runner(RealClock(), fixed_s=0.02), depth=2)
        core.add(request(1, 3, max_tokens=16))
        began, ends = time.monotonic(), []
        while core.has_work:
            if core.step():
                ends.append(time.monotonic() - began)
        late = [end - 0.02 * count for count, end in enumerate(ends, 1)]
        assert len(late) == 16
        assert min(late) >= 0
        return min(late[8:]) - min(late[:8])

    assert any(growth() < 0.0005 for _ in range(20))


def test_an_empty_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="vocabulary"):
        ClockRunner(StepTime(), VirtualClock(), GROUPS, 4, ())
