"""Fitting a model to what a client saw of a simulated engine whose coefficients are known."""

import random
from dataclasses import replace

import pytest
from gpu_models import gpu_model

from paceline.simulator.fit_log import Observed, fit_log, stage_error
from paceline.simulator.gpu_model import GpuModel
from paceline.simulator.simulate import SimulatedRequest, simulate, trace_prompt

TRUE = gpu_model(
    fixed_s=0.001,
    weights_s=0.006,
    token_s=6e-5,
    row_s=2e-5,
    kv_token_s=1e-7,
    pair_s=2e-8,
    request_s=0.003,
    sizes={"depth": 2, "max_num_seqs": 32},
)
START = replace(TRUE, step_time=gpu_model(weights_s=0.02, token_s=2e-5, kv_token_s=3e-7).step_time, request_s=0.0)


def stage(rate: float, seed: int, model: GpuModel = TRUE, count: int = 50) -> list[Observed]:
    rng, due, requests = random.Random(seed), 0.0, []
    for index in range(count):
        due += rng.expovariate(rate)
        requests.append(SimulatedRequest(due, trace_prompt(index, rng.randint(10, 500)), rng.randint(2, 30)))
    outcomes = simulate(requests, model)
    return [Observed(request, outcome.ttft, outcome.tpot) for request, outcome in zip(requests, outcomes, strict=True)]


def test_other_loads_are_predicted() -> None:
    """Fitted at 3 and 25 requests/s, judged at 12 and 40."""
    unseen = [stage(12, 3), stage(40, 4)]
    before = [stage_error(each, START) for each in unseen]
    assert min(error.ttft_mean for error in before) > 0.2
    progress: list[tuple[int, float]] = []
    fit = fit_log([stage(3, 1), stage(25, 2)], START, on_progress=lambda *news: progress.append(news))
    for error in [*fit.stages, *(stage_error(each, fit.model) for each in unseen)]:
        assert error.ttft_mean < 0.03
        assert error.tpot_mean < 0.02
    assert fit.model.engine == START.engine
    assert "pair_s" in fit.undetermined  # prompts of at most 500 tokens
    told = {"weights_s", "token_s"}
    assert not told & set(fit.undetermined)
    for name in told:
        assert getattr(fit.model.step_time, name) == pytest.approx(getattr(TRUE.step_time, name), rel=0.15)
    assert [tried for tried, _ in progress] == list(range(1, fit.simulations + 1))
    losses = [loss for _, loss in progress]
    assert losses == sorted(losses, reverse=True)


def test_what_a_stage_does_not_tell_is_named() -> None:
    """One idle stage of one length is fitted well by coefficients that are far off."""
    requests = [SimulatedRequest(5.0 * place, trace_prompt(place, 64), 20) for place in range(20)]
    outcomes = simulate(requests, TRUE)
    fit = fit_log([[Observed(each, out.ttft, out.tpot) for each, out in zip(requests, outcomes, strict=True)]], START)
    assert (fit.stages[0].ttft_each or 0) < 0.01
    assert abs(fit.model.step_time.pair_s / TRUE.step_time.pair_s - 1) > 0.5
    assert {"pair_s", "row_s", "kv_token_s", "token_s"} <= set(fit.undetermined)


def test_errors_by_hand() -> None:
    """Steps of 1 s: simulated TTFT 1 s for both, TPOT 1 s for the first; the second has one token and none."""
    requests = [SimulatedRequest(0.0, [1], 3), SimulatedRequest(10.0, [2], 1)]
    error = stage_error([Observed(requests[0], 2.0, 4.0), Observed(requests[1], 2.0, 5.0)], gpu_model(fixed_s=1.0))
    assert error.ttft_mean == error.ttft_each == pytest.approx(0.5)
    assert error.tpot_mean == error.tpot_each == pytest.approx(0.75)
    opposite = stage_error([Observed(requests[0], 0.5, None), Observed(requests[1], 1.5, None)], gpu_model(fixed_s=1.0))
    assert opposite.ttft_mean == pytest.approx(0.0)
    assert opposite.ttft_each == pytest.approx(0.5)
    assert opposite.tpot_mean is None


def test_nothing_measured() -> None:
    with pytest.raises(ValueError, match="no stage has"):
        fit_log([[Observed(SimulatedRequest(0.0, [1], 1), None, None)]], START)
