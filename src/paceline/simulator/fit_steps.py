"""A step-time model from the engine's own step log."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.engine.step_log import LoggedStep
from paceline.engine.step_time import StepTime, StepWork

Floats = NDArray[np.float64]

FEWEST = 20
"""Steps to fit to."""
PAUSE = 3.0
"""A step that takes so many times as long as predicted met a pause of the machine: the collector, a compiler."""
KNEES = 64
ROUNDS = 3
"""Of trying knees, each in a finer grid around the best."""


@dataclass(frozen=True, slots=True)
class StepFit:
    step_time: StepTime
    steps: int
    """Fitted to."""
    left_out: int
    """Pauses."""
    error: dict[str, float]
    """Of the steps fitted to, relative to each one's duration: ``mean``, ``p50``, ``p95`` and ``p99`` of the absolute
    error; ``total``, the error of the sum."""


def fit_steps(log: Sequence[LoggedStep]) -> StepFit:
    """Fits the coefficients of a `StepTime` to logged steps.

    The squared relative errors are made least, with no coefficient below 0. The model is linear once the knee, the
    number of tokens from which multiplications take longer than reading the weights, is known; so knees of ever
    finer grids are tried.

    Coefficients that the steps do not tell apart share their sum in some way: a fit predicts steps like those that it
    has seen, and needs some on both sides of the knee to predict both.

    Raises:
        ValueError: fewer than ``FEWEST`` steps.
    """
    steps = [step for step in log if step.seconds > 0 and step.work.tokens > 0]
    if len(steps) < FEWEST:
        raise ValueError(f"{len(steps)} steps are too few to fit to; {FEWEST} are needed")
    fitted = _fit(steps)
    kept = [step for step in steps if step.seconds < PAUSE * fitted.seconds(step.work)]
    if FEWEST <= len(kept) < len(steps):
        fitted = _fit(kept)
    else:
        kept = steps
    return StepFit(fitted, len(kept), len(steps) - len(kept), step_errors(fitted, kept))


def step_errors(step_time: StepTime, steps: Sequence[LoggedStep]) -> dict[str, float]:
    """How far predictions are from logged steps; see `StepFit.error`."""
    measured = np.array([step.seconds for step in steps])
    predicted = np.array([step_time.seconds(step.work) for step in steps])
    errors = np.abs(predicted / measured - 1)
    p50, p95, p99 = np.percentile(errors, [50, 95, 99]).tolist()
    total = abs(float(predicted.sum() / measured.sum()) - 1)
    return {"mean": float(errors.mean()), "p50": p50, "p95": p95, "p99": p99, "total": total}


def _fit(steps: Sequence[LoggedStep]) -> StepTime:
    seconds = np.array([step.seconds for step in steps])
    work = {name: np.array([getattr(step.work, name) for step in steps], float) for name in asdict(StepWork())}
    tokens = work["tokens"]
    others = np.column_stack([work["rows"], work["kv_tokens"], work["prompt_pairs"]])

    def at(knee: float) -> tuple[float, float, Floats]:
        # fixed + token_s * max(knee, tokens): with the knee at 0 there is no part that waits for weights.
        columns = np.column_stack([np.ones_like(tokens), np.maximum(tokens, knee), others])
        found, loss = nonnegative(columns / seconds[:, None], np.ones_like(seconds))
        return loss, knee, found

    grid = np.unique([0.0, *np.quantile(tokens, np.linspace(0, 1, KNEES))])
    for _ in range(ROUNDS):
        tried = [at(knee) for knee in grid.tolist()]
        best = min(range(len(tried)), key=lambda index: tried[index][0])
        grid = np.linspace(grid[max(0, best - 1)], grid[min(len(grid) - 1, best + 1)], KNEES // 4)
    _, knee, (fixed, token, row, kv_token, pair) = tried[best]
    return StepTime(
        fixed_s=float(fixed),
        weights_s=float(token * knee),
        token_s=float(token),
        row_s=float(row),
        kv_token_s=float(kv_token),
        pair_s=float(pair),
    )


def nonnegative(columns: Floats, target: Floats) -> tuple[Floats, float]:
    """Least squares with no coefficient below 0 (Lawson and Hanson, 1974, chapter 23).

    Args:
        columns: [equations, coefficients].
        target: [equations].

    Returns:
        The coefficients, and the sum of squares that is left.
    """
    scale = np.linalg.norm(columns, axis=0)
    scale[scale == 0] = 1.0
    scaled = columns / scale
    count = scaled.shape[1]
    found = np.zeros(count)
    free = np.zeros(count, dtype=bool)
    for _ in range(10 * count):
        gradient = scaled.T @ (target - scaled @ found)
        gradient[free] = 0.0
        if gradient.max() <= 1e-10 * np.linalg.norm(target):
            break
        free[gradient.argmax()] = True
        while True:
            trial = np.zeros(count)
            trial[free] = np.linalg.lstsq(scaled[:, free], target, rcond=None)[0]
            if (trial[free] > 0).all():
                break
            falling = free & (trial <= 0)
            shares = found[falling] / (found[falling] - trial[falling] + 1e-300)
            found = found + shares.min() * (trial - found)
            free &= found > 1e-14
            found[~free] = 0.0
            if not free.any():
                trial = np.zeros(count)
                break
        found = trial
    rest = target - scaled @ found
    return found / scale, float(rest @ rest)
