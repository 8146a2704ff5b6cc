"""Fitting a step-time model to logged steps."""

import itertools
import random

import numpy as np
import pytest

from paceline.engine.step_log import LoggedStep
from paceline.engine.step_time import StepTime, StepWork
from paceline.simulator.fit_steps import WINDOW, fit_steps, nonnegative, window_errors

TRUE = StepTime(fixed_s=1e-3, weights_s=3e-3, token_s=1.5e-5, row_s=4e-6, kv_token_s=1.5e-8, pair_s=1e-9)


def works(rng: random.Random, count: int) -> list[StepWork]:
    """Decode steps of up to 512 rows, half of them with a chunk of a prompt."""
    found = []
    for index in range(count):
        rows = rng.choice([1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
        work = StepWork(rows, rows, rows * rng.randint(1, 4000), 0)
        if index % 2:
            chunk, context = rng.randint(2, 2048), rng.randint(0, 4000)
            work.tokens += chunk
            work.prompt_pairs = chunk * context + chunk * (chunk + 1) // 2
        found.append(work)
    return found


def test_known_coefficients_are_found_again() -> None:
    rng = random.Random(1)
    log = [LoggedStep(work, TRUE.seconds(work)) for work in works(rng, 400)]
    fit = fit_steps(log)
    assert fit.left_out == 0
    assert fit.error["p99"] < 0.005
    knee = TRUE.weights_s / TRUE.token_s
    assert fit.step_time.weights_s / fit.step_time.token_s == pytest.approx(knee, rel=0.1)
    for name in ("token_s", "kv_token_s", "pair_s"):
        assert getattr(fit.step_time, name) == pytest.approx(getattr(TRUE, name), rel=0.03), name


def test_what_the_steps_do_not_tell_is_named() -> None:
    """Of decode steps alone, all on one side of the knee: what is only paid by prompts, and the two constants."""
    rng = random.Random(4)
    every = works(rng, 800)
    decode = [LoggedStep(work, TRUE.seconds(work)) for work in every if work.tokens <= 128 and not work.prompt_pairs]
    fit = fit_steps(decode)
    assert fit.error["p99"] < 0.005
    assert {"pair_s", "token_s"} <= set(fit.undetermined)
    assert "kv_token_s" not in fit.undetermined
    told = {"weights_s", "token_s", "kv_token_s"}
    assert not told & set(fit_steps([LoggedStep(work, TRUE.seconds(work)) for work in every]).undetermined)


def test_noise_and_pauses_do_not_move_predictions() -> None:
    rng = random.Random(2)
    log = [LoggedStep(work, TRUE.seconds(work) * rng.gauss(1, 0.03)) for work in works(rng, 600)]
    log[::100] = [LoggedStep(step.work, step.seconds + 0.5) for step in log[::100]]
    fit = fit_steps(log)
    assert fit.left_out == 6 * WINDOW
    unseen = [[LoggedStep(work, TRUE.seconds(work))] for work in works(random.Random(3), 200)]
    assert window_errors(fit.step_time, unseen)["mean"] < 0.015


def test_ends_that_are_noticed_late() -> None:
    """A few long steps among many short ones, whose ends the host often sees with those of the next."""
    rng = random.Random(5)
    log = [
        LoggedStep(work, TRUE.seconds(work)) for work in works(rng, 400) if work.prompt_pairs == 0 or rng.random() < 0.2
    ]
    for index in range(0, len(log) - 1, 5):
        first, second = log[index : index + 2]
        late = 0.9 * second.seconds
        log[index] = LoggedStep(first.work, first.seconds + late)
        log[index + 1] = LoggedStep(second.work, second.seconds - late)
    fit = fit_steps(log)
    unseen = [[LoggedStep(work, TRUE.seconds(work))] for work in works(random.Random(3), 200)]
    assert window_errors(fit.step_time, unseen)["mean"] < 0.1


def test_a_straight_line_would_be_wrong_at_the_knee() -> None:
    """What the knee is for: the same fit with the knee held at 0 errs by more than 10% somewhere."""
    log = [LoggedStep(work, TRUE.seconds(work)) for work in (StepWork(n, n, 0, 0) for n in range(1, 600))]
    columns = np.array([[1.0, step.work.tokens] for step in log])
    seconds = np.array([step.seconds for step in log])
    line, _ = nonnegative(columns / seconds[:, None], np.ones(len(log)))
    assert np.abs(columns @ line / seconds - 1).max() > 0.1
    assert fit_steps(log).error["p99"] < 0.01


def test_too_few_steps() -> None:
    with pytest.raises(ValueError, match="19 steps are too few"):
        fit_steps([LoggedStep(StepWork(1, 1, 1, 0), 0.01)] * 19)


def test_nonnegative_least_squares() -> None:
    """Against the best of all subsets of coefficients."""
    rng = np.random.default_rng(4)
    for _ in range(30):
        columns, target = rng.normal(size=(12, 4)), rng.normal(size=12)
        best = float(target @ target)
        for size in range(1, 5):
            for free in itertools.combinations(range(4), size):
                found = np.linalg.lstsq(columns[:, free], target, rcond=None)[0]
                if (found >= 0).all():
                    rest = target - columns[:, free] @ found
                    best = min(best, float(rest @ rest))
        found, loss = nonnegative(columns, target)
        assert (found >= 0).all()
        assert loss == pytest.approx(best)
