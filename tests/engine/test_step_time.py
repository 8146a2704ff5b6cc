"""The step-time model, against sums by hand."""

import pytest

from paceline.engine.step_time import StepTime, StepWork

MODEL = StepTime(fixed_s=1.0, weights_s=10.0, token_s=0.5, row_s=0.25, kv_token_s=0.125, pair_s=0.0625)


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (StepWork(tokens=1, rows=1, kv_tokens=8), 1 + 10 + 0.25 + 1),
        (StepWork(tokens=20, rows=20, kv_tokens=0), 1 + 10 + 5),
        (StepWork(tokens=21, rows=20, kv_tokens=0), 1 + 10.5 + 5),
        (StepWork(tokens=100, rows=0, prompt_pairs=32), 1 + 50 + 2),
        (StepWork(), 0.0),
    ],
)
def test_by_hand(work: StepWork, seconds: float) -> None:
    assert MODEL.seconds(work) == pytest.approx(seconds)


@pytest.mark.parametrize("value", [-1e-9, float("nan"), float("inf"), True, "1"])
def test_a_coefficient_out_of_range_is_named(value: object) -> None:
    with pytest.raises(ValueError, match=r"^kv_token_s: must be a number of seconds"):
        StepTime(kv_token_s=value)  # type: ignore[arg-type]
