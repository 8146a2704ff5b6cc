"""A step-time model from the engine's own step log."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.engine.step_log import LoggedStep
from paceline.engine.step_time import StepTime, StepWork
from paceline.simulator.undetermined import LEAST, undetermined

Floats = NDArray[np.float64]

FEWEST = 20
"""Steps to fit to."""
WINDOW = 8
"""Steps that are fitted together. The end of a step is when the host notices it; where it does so late, the step after
seems to be as much shorter."""
PAUSE = 1.5
"""What takes so many times as long as predicted met a pause of the machine: the collector, a compiler."""
KNEES = 64
ROUNDS = 3
"""Of trying knees, each in a finer grid around the best."""


@dataclass(frozen=True, slots=True)
class StepFit:
    step_time: StepTime
    steps: int
    """Fitted to."""
    left_out: int
    """Steps around pauses."""
    error: dict[str, float]
    """Of the windows fitted to, relative to each one's duration: ``mean``, ``p50``, ``p95`` and ``p99`` of the absolute
    error; ``total``, the error of the sum."""
    undetermined: list[str]
    """Coefficients that the steps do not tell, or only together with others."""


def fit_steps(log: Sequence[LoggedStep]) -> StepFit:
    """Fits the coefficients of a `StepTime` to logged steps, in the order of the log.

    The squared relative errors of windows of ``WINDOW`` steps are made least (in a short log, of each step), with no
    coefficient below 0. The model is linear once the knee, the
    number of tokens from which multiplications take longer than reading the weights, is known; so knees of ever
    finer grids are tried.

    Coefficients that the steps do not tell apart share their sum in some way, and are named: a fit predicts steps like
    those that it has seen, and needs some on both sides of the knee to predict both.

    Raises:
        ValueError: fewer than ``FEWEST`` steps.
    """
    steps = [step for step in log if step.seconds > 0 and step.work.tokens > 0]
    if len(steps) < FEWEST:
        raise ValueError(f"{len(steps)} steps are too few to fit to; {FEWEST} are needed")
    size = WINDOW if len(steps) >= WINDOW * FEWEST else 1
    windows = [steps[start : start + size] for start in range(0, len(steps), size)]
    fitted = _fit(windows)
    predicted, measured = _durations(fitted, windows)
    kept = [window for window, pause in zip(windows, measured > PAUSE * predicted, strict=True) if not pause]
    if FEWEST <= len(kept) < len(windows):
        fitted = _fit(kept)
    else:
        kept = windows
    count = sum(map(len, kept))
    return StepFit(fitted, count, len(steps) - count, window_errors(fitted, kept), _undetermined(fitted, kept))


def window_errors(step_time: StepTime, windows: Sequence[Sequence[LoggedStep]]) -> dict[str, float]:
    """How far predictions are from logged windows of steps; see `StepFit.error`."""
    predicted, measured = _durations(step_time, windows)
    errors = np.abs(predicted / measured - 1)
    p50, p95, p99 = np.percentile(errors, [50, 95, 99]).tolist()
    total = abs(float(predicted.sum() / measured.sum()) - 1)
    return {"mean": float(errors.mean()), "p50": p50, "p95": p95, "p99": p99, "total": total}


def _undetermined(step_time: StepTime, windows: Sequence[Sequence[LoggedStep]]) -> list[str]:
    predicted, measured = _durations(step_time, windows)
    values = asdict(step_time)
    columns = np.zeros((len(windows), len(values)))
    for row, window in zip(columns, windows, strict=True):
        for work in (step.work for step in window):
            below = step_time.weights_s >= work.tokens * step_time.token_s
            row += (1, below, 0 if below else work.tokens, work.rows, work.kv_tokens, work.prompt_pairs)
    rests = np.maximum(np.abs(1 - predicted / measured), LEAST)
    left_open = undetermined(columns / measured[:, None], rests, np.array(list(values.values())))
    return [name for name, is_open in zip(values, left_open, strict=True) if is_open]


def _durations(step_time: StepTime, windows: Sequence[Sequence[LoggedStep]]) -> tuple[Floats, Floats]:
    """Predicted and measured."""
    predicted = np.array([sum(step_time.seconds(step.work) for step in window) for window in windows])
    return predicted, np.array([sum(step.seconds for step in window) for window in windows])


def _fit(windows: Sequence[Sequence[LoggedStep]]) -> StepTime:
    steps = [step for window in windows for step in window]
    starts = np.cumsum([0, *map(len, windows[:-1])])
    seconds = np.add.reduceat([step.seconds for step in steps], starts)
    work = {name: np.array([getattr(step.work, name) for step in steps], float) for name in asdict(StepWork())}
    tokens = work["tokens"]
    others = np.column_stack([work["rows"], work["kv_tokens"], work["prompt_pairs"]])

    def at(knee: float) -> tuple[float, float, Floats]:
        # fixed + token_s * max(knee, tokens): with the knee at 0 there is no part that waits for weights.
        each = np.column_stack([np.ones_like(tokens), np.maximum(tokens, knee), others])
        columns = np.add.reduceat(each, starts)
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
