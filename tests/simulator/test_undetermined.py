"""What a least-squares fit leaves open, of problems whose answer is known."""

import numpy as np
import pytest

from paceline.simulator.undetermined import undetermined

DRAW = np.random.default_rng(1)
COLUMNS = DRAW.normal(size=(400, 3))


def test_all_are_told() -> None:
    assert not undetermined(COLUMNS, np.full(400, 0.1), np.array([1.0, 2.0, 3.0])).any()


@pytest.mark.parametrize(("error", "is_open"), [(2.5, False), (4.0, True)])
def test_the_size_of_an_interval(error: float, is_open: bool) -> None:
    """A value of 1 seen 400 times, each off by ``error``: 1.96 * error / 20, which is 0.245 or 0.392."""
    found = undetermined(np.ones((400, 1)), np.full(400, error), np.ones(1))
    assert found.tolist() == [is_open]


def test_what_is_in_no_equation_or_only_with_others() -> None:
    columns = np.column_stack([COLUMNS[:, 0], np.zeros(400), COLUMNS[:, 1], 2 * COLUMNS[:, 1]])
    assert undetermined(columns, np.full(400, 0.001), np.ones(4)).tolist() == [False, True, True, True]


def test_a_value_of_zero_and_too_few_equations() -> None:
    assert undetermined(COLUMNS, np.full(400, 0.1), np.array([1.0, 0.0, 1.0])).tolist() == [False, True, False]
    assert undetermined(COLUMNS[:3], np.full(3, 0.001), np.ones(3)).all()
