"""A step-time model from what a client saw: by simulating its requests and making the difference small."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paceline.engine.step_time import StepTime
from paceline.simulator.gpu_model import GpuModel
from paceline.simulator.simulate import SimulatedRequest, simulate

COEFFICIENTS = ("fixed_s", "weights_s", "token_s", "row_s", "kv_token_s", "pair_s")
FLOORS = {
    "fixed_s": 1e-4,
    "weights_s": 1e-3,
    "token_s": 1e-6,
    "row_s": 1e-6,
    "kv_token_s": 1e-9,
    "pair_s": 1e-10,
    "request_s": 1e-4,
}
"""Where the search starts for coefficients that are 0, since it multiplies."""
FIRST_FACTOR = 2.0
LAST_FACTOR = 1.01


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
    """Tried sets of coefficients."""


def fit_log(
    stages: Sequence[Sequence[Observed]],
    start: GpuModel,
    *,
    most_simulations: int = 300,
    prefix_cache: bool = True,
    on_progress: Callable[[int, float], None] | None = None,
) -> LogFit:
    """Fits the coefficients and ``request_s`` of a model to stages on one engine.

    The loss is the mean over all stages of ``ttft_each`` and ``tpot_each``. The search is a pattern search (Hooke and
    Jeeves, 1961) on the logarithms: each coefficient in turn, and all together, times a factor or divided by it; the
    factor becomes its square root when nothing helps. It finds a near minimum, not always the least.

    A client does not see steps: what its stages do not vary is not told apart. Loads from idle to nearly saturated, and
    prompts and outputs of several lengths, say most.

    Args:
        stages: each from an idle start.
        start: where to search from; its engine's sizes are kept and must be those of the measured engine.
        most_simulations: when to stop at the latest.
        on_progress: called with the simulations so far and the least loss.

    Raises:
        ValueError: nothing was measured.
    """
    if not any(seen.ttft_s is not None for stage in stages for seen in stage):
        raise ValueError("no stage has a request with a measured TTFT")
    search = _Search(stages, start, prefix_cache, on_progress)
    factor = FIRST_FACTOR
    while factor >= LAST_FACTOR and search.tried < most_simulations:
        if not search.round(factor, most_simulations):
            factor = math.sqrt(factor)
    model = search.model(search.best)
    return LogFit(model, [stage_error(stage, model, prefix_cache) for stage in stages], search.tried)


def stage_error(stage: Sequence[Observed], model: GpuModel, prefix_cache: bool = True) -> StageError:
    """How far the simulation of a stage is from what was seen."""
    outcomes = simulate([seen.request for seen in stage], model, prefix_cache=prefix_cache)
    ttft = [(outcome.ttft, seen.ttft_s) for outcome, seen in zip(outcomes, stage, strict=True)]
    tpot = [(outcome.tpot, seen.tpot_s) for outcome, seen in zip(outcomes, stage, strict=True)]
    (ttft_mean, ttft_each), (tpot_mean, tpot_each) = _mean_error(ttft), _mean_error(tpot)
    return StageError(ttft_mean, tpot_mean, ttft_each, tpot_each)


class _Search:
    def __init__(
        self,
        stages: Sequence[Sequence[Observed]],
        start: GpuModel,
        prefix_cache: bool,
        on_progress: Callable[[int, float], None] | None,
    ) -> None:
        self._stages = stages
        self._start = start
        self._prefix_cache = prefix_cache
        self._on_progress = on_progress
        given = {name: getattr(start.step_time, name) for name in COEFFICIENTS} | {"request_s": start.request_s}
        self.tried = 0
        self.best = {name: value or FLOORS[name] for name, value in given.items()}
        self._loss = self._loss_of(self.best)

    def model(self, values: dict[str, float]) -> GpuModel:
        step_time = StepTime(**{name: values[name] for name in COEFFICIENTS})
        return replace(self._start, step_time=step_time, request_s=values["request_s"])

    def round(self, factor: float, most: int) -> bool:
        """Tries every direction once; whether one helped."""
        helped = False
        for names in (FLOORS.keys(), *([name] for name in FLOORS)):
            for by in (factor, 1 / factor):
                if self.tried >= most:
                    return helped
                values = {name: value * by if name in names else value for name, value in self.best.items()}
                loss = self._loss_of(values)
                if loss < self._loss:
                    self.best, self._loss, helped = values, loss, True
                    break
        return helped

    def _loss_of(self, values: dict[str, float]) -> float:
        self.tried += 1
        errors = []
        for stage in self._stages:
            error = stage_error(stage, self.model(values), self._prefix_cache)
            errors += [part for part in (error.ttft_each, error.tpot_each) if part is not None]
        loss = sum(errors) / len(errors)
        if self._on_progress is not None:
            self._on_progress(self.tried, loss if self.tried == 1 else min(loss, self._loss))
        return loss


def _mean_error(pairs: Sequence[tuple[float | None, float | None]]) -> tuple[float | None, float | None]:
    """(error of the mean, mean of the errors) of (simulated, measured), relative to the mean measured."""
    known = [(simulated, seen) for simulated, seen in pairs if simulated is not None and seen is not None]
    total = sum(seen for _, seen in known)
    if total <= 0:
        return None, None
    of_mean = abs(sum(simulated for simulated, _ in known) / total - 1)
    return of_mean, sum(abs(simulated - seen) for simulated, seen in known) / total
