"""Simulation of requests, against times worked out without it."""

import random
from itertools import pairwise

import pytest
from gpu_models import gpu_model

from paceline.simulator.simulate import Outcome, SimulatedRequest, simulate, trace_prompt


def requests(dues: list[float], prompt: int = 10, output: int = 1) -> list[SimulatedRequest]:
    return [SimulatedRequest(due, trace_prompt(index, prompt), output) for index, due in enumerate(dues)]


def times(outcome: Outcome) -> list[float]:
    return [time for time, _ in outcome.tokens]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_one_request_by_hand(depth: int) -> None:
    """10 prompt tokens are 55 pairs; then each token reads 11, 12, ... tokens of the cache."""
    model = gpu_model(fixed_s=1.0, token_s=0.1, row_s=0.01, kv_token_s=1e-3, pair_s=1e-4, sizes={"depth": depth})
    [outcome] = simulate(requests([5.0], output=4), model)
    steps = [1 + 10 * 0.1 + 0.01 + 55e-4] + [1 + 0.1 + 0.01 + context * 1e-3 for context in (11, 12, 13)]
    expected = [5 + sum(steps[: count + 1]) for count in range(4)]
    assert times(outcome) == pytest.approx(expected)
    assert (outcome.due, outcome.scheduled, outcome.replica, outcome.error) == (5.0, 5.0, 0, None)
    assert outcome.ttft == pytest.approx(steps[0])
    assert outcome.tpot == pytest.approx(sum(steps[1:]) / 3)


def test_a_single_server_queue() -> None:
    """With one seat, one token each and equal work this is a queue G/D/1: waits follow Lindley's recursion."""
    rng = random.Random(1)
    dues = [0.0]
    for _ in range(300):
        dues.append(dues[-1] + rng.expovariate(9.0))
    outcomes = simulate(requests(dues), gpu_model(fixed_s=0.1, sizes={"max_num_seqs": 1}))
    wait, waits = 0.0, [0.0]
    for before, due in pairwise(dues):
        wait = max(0.0, wait + 0.1 - (due - before))
        waits.append(wait)
    assert max(waits) > 0.5
    assert [outcome.ttft - 0.1 for outcome in outcomes] == pytest.approx(waits, abs=1e-6)
    assert [outcome.scheduled - outcome.due for outcome in outcomes] == pytest.approx(waits, abs=1e-6)


def test_a_burst_in_chunks() -> None:
    """Three prompts of 60 tokens in steps of 100 tokens: the second is cut; who has begun gets one token a step."""
    model = gpu_model(token_s=0.01, sizes={"max_num_batched_tokens": 100})
    first, second, third = (times(outcome) for outcome in simulate(requests([0.0] * 3, 60, 3), model))
    # Steps: 60 + 40; 1 + 20 + 60; 1 + 1 + 1; 1 + 1; 0.
    assert first == pytest.approx([1.0, 1.81, 1.84])
    assert second == pytest.approx([1.81, 1.84, 1.86])
    assert third == pytest.approx([1.81, 1.84, 1.86])


def test_arrivals_wait_for_the_end_of_a_step() -> None:
    """With two steps under way the next one is already decided while one runs: two steps to wait for, not one."""
    for depth, first in ((1, 2.0), (2, 3.0)):
        model = gpu_model(fixed_s=1.0, sizes={"depth": depth})
        outcomes = simulate(requests([0.0, 0.5], output=8), model)
        assert times(outcomes[0]) == pytest.approx([1, 2, 3, 4, 5, 6, 7, 8])
        assert outcomes[1].first == pytest.approx(first)


def test_the_way_to_the_engine_and_back() -> None:
    [outcome] = simulate(requests([1.0], output=3), gpu_model(fixed_s=1.0, request_s=0.5))
    assert times(outcome) == pytest.approx([2.5, 3.5, 4.5])
    assert outcome.scheduled == pytest.approx(1.25)


def test_replicas_share_the_load() -> None:
    model = gpu_model(fixed_s=1.0, sizes={"max_num_seqs": 1})
    dues = [0.0, 0.1, 0.2, 0.3]
    assert [outcome.ttft for outcome in simulate(requests(dues), model)] == pytest.approx([1.0, 1.9, 2.8, 3.7])
    for routing in ("round_robin", "least_loaded"):
        outcomes = simulate(requests(dues), model, replicas=2, routing=routing)
        assert [outcome.replica for outcome in outcomes] == [0, 1, 0, 1]
        assert [outcome.ttft for outcome in outcomes] == pytest.approx([1.0, 1.0, 1.8, 1.8])


def test_the_least_loaded_replica_is_the_one_with_fewer_open_requests() -> None:
    """Request 0 is long, so everything after it goes to the other one while that one is free."""
    model = gpu_model(fixed_s=1.0)
    planned = [SimulatedRequest(0.0, [1], 50), *(SimulatedRequest(float(2 * i), [2], 1) for i in range(1, 6))]
    assert [outcome.replica for outcome in simulate(planned, model, replicas=2)] == [0, 1, 1, 1, 1, 1]
    turns = simulate(planned, model, replicas=2, routing="round_robin")
    assert [outcome.replica for outcome in turns] == [0, 1, 0, 1, 0, 1]


def test_a_closed_loop() -> None:
    """Two seats of a client: each next request is sent when the one before has ended, half a second later."""
    planned = [SimulatedRequest(0.0, [i], 2) if i < 2 else SimulatedRequest(0.5, [i], 2, i - 2) for i in range(6)]
    outcomes = simulate(planned, gpu_model(fixed_s=1.0))
    assert [outcome.due for outcome in outcomes] == pytest.approx([0, 0, 2.5, 2.5, 5, 5])
    assert [outcome.last for outcome in outcomes] == pytest.approx([2, 2, 4.5, 4.5, 7, 7])


def test_shared_blocks_are_computed_once() -> None:
    """64 shared tokens of 80 are found; 16 of their own are computed."""
    prompts = [trace_prompt(index, 80, (7, 8), 32) for index in range(2)]
    assert prompts[0][:64] == prompts[1][:64]
    assert prompts[0][64:] != prompts[1][64:]
    planned = [SimulatedRequest(10.0 * index, prompt, 1) for index, prompt in enumerate(prompts)]
    model = gpu_model(token_s=0.01)
    outcomes = simulate(planned, model)
    assert [outcome.cached_tokens for outcome in outcomes] == [0, 64]
    assert [outcome.ttft for outcome in outcomes] == pytest.approx([0.8, 0.16])
    assert simulate(planned, model, prefix_cache=False)[1].ttft == pytest.approx(0.8)


def test_a_prompt_is_cut_to_its_length() -> None:
    assert trace_prompt(4, 5, (9, 9), 3) == [9] * 5
    assert trace_prompt(4, 8, (9,), 3) == [9] * 3 + [-5] * 5


def test_too_long_requests_fail_alone() -> None:
    planned = [SimulatedRequest(0.0, [1] * 4000, 97), SimulatedRequest(0.0, [1], 2), SimulatedRequest(1.0, [1], 2, 0)]
    ended: list[int] = []
    long, short, follower = simulate(planned, gpu_model(fixed_s=1.0), on_progress=ended.append)
    assert "exceed the context of 4096" in str(long.error)
    assert times(short) == [1.0, 2.0]
    assert follower.error == "the request that it follows failed"
    assert follower.due is None
    assert ended == [1, 2, 3]


@pytest.mark.parametrize(
    ("planned", "options", "message"),
    [
        ([], {"replicas": 0}, "replicas"),
        ([SimulatedRequest(0.0, [], 1)], {}, "request 0"),
        ([SimulatedRequest(0.0, [1], 0)], {}, "request 0"),
        ([SimulatedRequest(0.0, [1], 1, after=1)], {}, "no request 1"),
    ],
)
def test_nonsense_is_refused(planned: list[SimulatedRequest], options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(planned, gpu_model(), **options)
