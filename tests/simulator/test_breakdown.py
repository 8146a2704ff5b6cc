"""Latencies taken apart: the parts by hand, and their sum."""

import random

import numpy as np
import pytest
from gpu_models import gpu_model

from paceline.simulator.breakdown import COEFFICIENTS, breakdown
from paceline.simulator.simulate import SimulatedRequest, trace_prompt

MODEL = gpu_model(
    fixed_s=0.001,
    weights_s=0.006,
    token_s=6e-5,
    row_s=2e-5,
    kv_token_s=1e-7,
    pair_s=2e-8,
    request_s=0.003,
    sizes={"depth": 2, "max_num_seqs": 4},
)


def requests(closed: bool) -> list[SimulatedRequest]:
    rng, due, found = random.Random(1), 0.0, []
    for index in range(40):
        due += rng.expovariate(30)
        prompt = trace_prompt(index, rng.randint(10, 500))
        if closed and index > 2:
            found.append(SimulatedRequest(0.1 * (index % 3), prompt, rng.randint(1, 12), index - 3))
        else:
            found.append(SimulatedRequest(due, prompt, rng.randint(1, 12)))
    found.append(SimulatedRequest(0.0, [1] * 5000, 1))
    return found


@pytest.mark.parametrize("closed", [False, True])
def test_the_sum_of_the_parts(closed: bool) -> None:
    found = breakdown(requests(closed), MODEL)
    values = np.array([getattr(MODEL.step_time, name, MODEL.request_s) for name in COEFFICIENTS])
    for metric in ("ttft", "tpot"):
        whole = [getattr(outcome, metric) for outcome in found.outcomes]
        expected = np.array([np.nan if value is None else value for value in whole])
        assert getattr(found, metric) @ values == pytest.approx(expected, nan_ok=True)
        assert np.isnan(expected).sum() < 10


def test_by_hand() -> None:
    """One step a second. The second request comes in the middle of a step; both share two."""
    found = breakdown(
        [SimulatedRequest(0.0, [1] * 4, 4), SimulatedRequest(1.5, [2] * 3, 2)], gpu_model(fixed_s=0.5, weights_s=0.5)
    )
    assert [outcome.first for outcome in found.outcomes] == [1.0, 3.0]
    fixed, weights, token, row, kv_token, pair, request = found.ttft.T.tolist()
    assert fixed == weights == [1.0, 1.5]
    assert token == [0.0, 0.0]
    assert row == [1.0, 0.5 + 2]
    assert kv_token == [0.0, 0.5 * 5 + 6]
    assert pair == [10.0, 6.0]
    assert request == [1.0, 1.0]
    assert found.tpot[0].tolist() == pytest.approx([1, 1, 0, (1 + 2 + 2) / 3, (5 + 6 + 7 + 4) / 3, 6 / 3, 0])


def test_nothing_served() -> None:
    found = breakdown([SimulatedRequest(0.0, [1] * 5000, 1)], MODEL)
    assert np.isnan(found.ttft).all()
    assert np.isnan(found.tpot).all()
