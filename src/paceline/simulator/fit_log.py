"""A step-time model from what a client saw: by simulating its requests and making the difference small."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paceline.engine.step_time import StepTime
from paceline.simulator.breakdown import COEFFICIENTS, Breakdown, breakdown
from paceline.simulator.fit_steps import nonnegative
from paceline.simulator.gpu_model import GpuModel
from paceline.simulator.simulate import SimulatedRequest
from paceline.simulator.undetermined import LEAST, undetermined

Floats = NDArray[np.float64]

KNEES = 16.0, 8192.0
"""Range of the tokens from which multiplications take longer than reading the weights."""
FINEST = 5
"""Times that the step between knees which are tried is halved, from a factor of 2 on."""
STARTS = (32.0, 128.0, 512.0, 2048.0)
"""Knees to start from."""
KEPT = 2
"""Starts that go on after the first rounds."""
REACH = 8.0
"""First factor by which a round may move the knee; halved after one that did not help."""
DAMPING = 0.2
"""First pull towards the coefficients of the round before, which also holds what the stages do not tell apart."""
DAMPING_STEP = 3.0
"""Less of it after each round that helped, more after one that did not."""
SMALL = 0.03
"""Relative errors below it weigh as their squares, those above as they are: a pause spoils few requests."""
ROUNDS = 3, 8
"""At most, from each start, and from each that is kept."""
NEAR = 1.1
"""Factor to the knees beside one that show what it changes."""
ENOUGH = 0.002
"""Relative gain of a round that is the last."""

FREE = tuple(name for name in COEFFICIENTS if name != "token_s")
WEIGHTS = FREE.index("weights_s")
FIRST_WEIGHTS_S = 0.001


@dataclass(frozen=True, slots=True)
class Observed:
    """One request as it was sent, and what its client saw."""

    request: SimulatedRequest
    ttft_s: float | None
    """From the send that `SimulatedRequest.due` says; None: not measured, or failed."""
    tpot_s: float | None


@dataclass(frozen=True, slots=True)
class StageError:
    """Relative errors of the simulation of one stage; None where nothing was measured."""

    ttft_mean: float | None
    tpot_mean: float | None
    ttft_each: float | None
    """Sum of the absolute errors of all requests / sum of the measured values."""
    tpot_each: float | None


@dataclass(frozen=True, slots=True)
class LogFit:
    model: GpuModel
    stages: list[StageError]
    simulations: int
    """Sets of coefficients that were tried."""
    undetermined: list[str]
    """Coefficients that the stages do not tell, or only together: others would fit as well, and predict other loads."""


def fit_log(
    stages: Sequence[Sequence[Observed]],
    start: GpuModel,
    *,
    prefix_cache: bool = True,
    on_progress: Callable[[int, float], None] | None = None,
) -> LogFit:
    """Fits the coefficients and ``request_s`` of a model to stages on one engine.

    The loss is the mean over all stages of ``ttft_each`` and ``tpot_each``. Each round simulates the stages, takes the
    latencies apart into how often each coefficient is in them (`breakdown`), and solves for the coefficients that bring
    them to what was measured (least squares damped as by Levenberg, 1944, and reweighted as by Huber, 1964; none below
    0). For a given knee that is exact as long as steps keep their work, so it is solved for every knee within reach and
    the best is taken. Work depends on speed, the more the higher the load; so a round with the least loaded stage comes
    first. The loss is rough, since a step more or less makes another batch; so there are several starts, of which the
    better ones go on. The result is near the least loss, not always at it.

    A client does not see steps: what its stages do not vary is not told apart, and named in `LogFit.undetermined`; the
    errors, which are of the stages fitted to, say nothing of it. Loads from idle to nearly saturated, and
    prompts and outputs of several lengths, say most.

    Args:
        stages: each from an idle start.
        start: where to search from; its engine's sizes are kept and must be those of the measured engine.
        on_progress: called with the simulations so far and the least loss.

    Raises:
        ValueError: nothing was measured.
    """
    if not any(seen.ttft_s is not None for stage in stages for seen in stage):
        raise ValueError("no stage has a request with a measured TTFT")
    search = _Search(stages, start, prefix_cache, on_progress)
    best = search.fit()
    errors = [stage_error(stage, best.model, prefix_cache) for stage in stages]
    return LogFit(best.model, errors, search.tried, search.undetermined(best))


def stage_error(stage: Sequence[Observed], model: GpuModel, prefix_cache: bool = True) -> StageError:
    """How far the simulation of a stage is from what was seen."""
    return _error(stage, breakdown([seen.request for seen in stage], model, prefix_cache=prefix_cache))


@dataclass(frozen=True, slots=True)
class _Trial:
    knee: float
    values: Floats
    """Of `FREE`."""
    model: GpuModel
    stages: list[Breakdown]
    """As many as were simulated, the least loaded first."""
    loss: float


class _Search:
    def __init__(
        self,
        stages: Sequence[Sequence[Observed]],
        start: GpuModel,
        prefix_cache: bool,
        on_progress: Callable[[int, float], None] | None,
    ) -> None:
        self._stages = sorted(stages, key=_load)
        self._start = start
        self._prefix_cache = prefix_cache
        self._on_progress = on_progress
        self._least = float("inf")
        self.tried = 0

    def fit(self) -> _Trial:
        values = np.array([getattr(self._start.step_time, name, self._start.request_s) for name in FREE])
        values[WEIGHTS] = values[WEIGHTS] or FIRST_WEIGHTS_S
        calm = [self.descend(self.at(values, knee, 1), 1) for knee in STARTS]
        every = len(self._stages)
        trials = [self.descend(self.at(trial.values, trial.knee, every), ROUNDS[0]) for trial in calm]
        trials.sort(key=lambda trial: trial.loss)
        return min((self.descend(trial, ROUNDS[1]) for trial in trials[:KEPT]), key=lambda trial: trial.loss)

    def at(self, values: Floats, knee: float, count: int) -> _Trial:
        """Simulates the ``count`` least loaded stages."""
        self.tried += 1
        times = dict(zip(FREE, values.tolist(), strict=True))
        request_s = times.pop("request_s")
        step_time = StepTime(**times, token_s=times["weights_s"] / knee)
        model = replace(self._start, step_time=step_time, request_s=request_s)
        stages = self._stages[:count]
        found = [
            breakdown([seen.request for seen in stage], model, prefix_cache=self._prefix_cache) for stage in stages
        ]
        errors = [_error(stage, each) for stage, each in zip(stages, found, strict=True)]
        parts = [part for error in errors for part in (error.ttft_each, error.tpot_each) if part is not None]
        loss = sum(parts) / len(parts)
        if len(stages) == len(self._stages):
            self._least = min(self._least, loss)
        if self._on_progress is not None:
            self._on_progress(self.tried, self._least)
        return _Trial(knee, values, model, found, loss)

    def descend(self, trial: _Trial, rounds: int) -> _Trial:
        damping, reach = DAMPING, REACH
        for _ in range(rounds):
            found = self.at(*self._solve(trial, damping, reach), len(trial.stages))
            if found.loss < trial.loss:
                enough = trial.loss - found.loss < ENOUGH * trial.loss
                trial, damping = found, damping / DAMPING_STEP
                if enough:
                    return trial
            else:
                damping, reach = damping * DAMPING_STEP, reach / 2
        return trial

    def undetermined(self, trial: _Trial) -> list[str]:
        equations = self._equations(trial)
        if not equations:
            return list(COEFFICIENTS)
        columns = np.concatenate([equation.counts for equation in equations])
        ends = trial.knee / NEAR, trial.knee * NEAR
        low, high = (np.concatenate([equation.weights_at(knee) for equation in equations]) for knee in ends)
        # The knee's own column, by its logarithm.
        bend = trial.values[WEIGHTS] * (high - low) / (2 * np.log(NEAR))
        rests = np.concatenate([equation.target - equation.counts @ trial.values for equation in equations])
        expected = np.concatenate([equation.least for equation in equations])
        left_open = undetermined(
            np.column_stack([columns, bend]), np.maximum(np.abs(rests), expected), np.append(trial.values, 1.0)
        )
        return [name for name, is_open in zip((*FREE, "token_s"), left_open, strict=True) if is_open]

    def _equations(self, trial: _Trial) -> "list[_Equation]":
        return [
            equation
            for stage, found in zip(self._stages, trial.stages, strict=False)
            for metric in ("ttft", "tpot")
            if (equation := _equation(stage, found, metric, trial)) is not None
        ]

    def _solve(self, trial: _Trial, damping: float, reach: float) -> tuple[Floats, float]:
        """The values and the knee at which the latencies would be as measured if every step kept its work."""
        equations = self._equations(trial)
        if not equations:
            return trial.values, trial.knee
        low, high = max(KNEES[0], trial.knee / reach), min(KNEES[1], trial.knee * reach)
        solved = {trial.knee: _solve_at(equations, trial.knee, trial, damping)}
        knee = trial.knee
        for halvings in range(FINEST + 1):
            factor = 2 ** (0.5**halvings)
            span = range(-10, 11) if halvings == 0 else (-1, 1)
            for near in [knee * factor**times for times in span]:
                if low <= near <= high and near not in solved:
                    solved[near] = _solve_at(equations, near, trial, damping)
            knee = min(solved, key=lambda knee: solved[knee][1])
        return solved[knee][0], knee


@dataclass(frozen=True, slots=True)
class _Equation:
    """Counts @ values = target, of one latency of the requests of one stage."""

    counts: Floats
    """[requests, `FREE`], weighted; those of ``weights_s`` are of the trial's knee."""
    weights_at: Callable[[float], Floats]
    """Those of ``weights_s`` at another knee."""
    target: Floats
    least: Floats
    """What an error of `LEAST` would be of each."""


def _equation(stage: Sequence[Observed], found: Breakdown, metric: str, trial: _Trial) -> _Equation | None:
    simulated = _floats([getattr(outcome, metric) for outcome in found.outcomes])
    measured = _floats([getattr(seen, f"{metric}_s") for seen in stage])
    known = np.isfinite(simulated) & np.isfinite(measured)
    if not known.any():
        return None
    mean = measured[known].mean()
    gap = (measured[known] - simulated[known]) / mean
    # Each stage and metric counts as much as the others, however many requests it has.
    weight = 1 / np.sqrt(known.sum() * np.maximum(np.abs(gap), SMALL))

    def weights_at(knee: float) -> Floats:
        of_ttft, of_tpot = found.weights_at(knee)
        return (of_ttft if metric == "ttft" else of_tpot)[known] * weight / mean

    counts = getattr(found, metric)[known][:, [COEFFICIENTS.index(name) for name in FREE]] * (weight / mean)[:, None]
    counts[:, WEIGHTS] = weights_at(trial.knee)
    return _Equation(counts, weights_at, gap * weight + counts @ trial.values, LEAST * weight)


def _solve_at(equations: Sequence[_Equation], knee: float, trial: _Trial, damping: float) -> tuple[Floats, float]:
    """Values of `FREE`, and the sum of squares that is left."""
    columns = np.concatenate([equation.counts for equation in equations])
    columns[:, WEIGHTS] = np.concatenate([equation.weights_at(knee) for equation in equations])
    target = np.concatenate([equation.target for equation in equations])
    pull = damping * np.linalg.norm(columns, axis=0)
    # The same problem in as few equations as there are unknowns, and one: it is solved for many knees.
    rows = np.column_stack([np.vstack([columns, np.diag(pull)]), np.append(target, pull * trial.values)])
    small: Floats = np.linalg.qr(rows, mode="r")  # type: ignore[assignment]
    aim, left = nonnegative(small[:, :-1], small[:, -1])
    # What no step depends on stays as it was.
    return np.where(pull > 0, aim, trial.values), left


def _load(stage: Sequence[Observed]) -> float:
    """Mean number of open requests, roughly."""
    dues = [seen.request.due for seen in stage if seen.request.after is None]
    waits = [
        seen.ttft_s + (seen.tpot_s or 0.0) * seen.request.output_tokens for seen in stage if seen.ttft_s is not None
    ]
    span = max(dues) - min(dues)
    return sum(waits) / (span or max(waits, default=1.0))


def _floats(values: Sequence[float | None]) -> Floats:
    return np.array([np.nan if value is None else value for value in values])


def _error(stage: Sequence[Observed], found: Breakdown) -> StageError:
    ttft = [(outcome.ttft, seen.ttft_s) for outcome, seen in zip(found.outcomes, stage, strict=True)]
    tpot = [(outcome.tpot, seen.tpot_s) for outcome, seen in zip(found.outcomes, stage, strict=True)]
    (ttft_mean, ttft_each), (tpot_mean, tpot_each) = _mean_error(ttft), _mean_error(tpot)
    return StageError(ttft_mean, tpot_mean, ttft_each, tpot_each)


def _mean_error(pairs: Sequence[tuple[float | None, float | None]]) -> tuple[float | None, float | None]:
    """(error of the mean, mean of the errors) of (simulated, measured), relative to the mean measured."""
    known = [(simulated, seen) for simulated, seen in pairs if simulated is not None and seen is not None]
    total = sum(seen for _, seen in known)
    if total <= 0:
        return None, None
    of_mean = abs(sum(simulated for simulated, _ in known) / total - 1)
    return of_mean, sum(abs(simulated - seen) for simulated, seen in known) / total
