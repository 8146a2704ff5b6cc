"""What each coefficient of a model contributes to simulated latencies."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.engine.step_time import StepTime, StepWork
from paceline.simulator.gpu_model import GpuModel
from paceline.simulator.simulate import Outcome, SimulatedRequest, simulate

Floats = NDArray[np.float64]

COEFFICIENTS = ("fixed_s", "weights_s", "token_s", "row_s", "kv_token_s", "pair_s", "request_s")
REQUEST = COEFFICIENTS.index("request_s")


@dataclass(frozen=True, slots=True)
class Breakdown:
    """A simulation, and how often each coefficient is in each latency: ``ttft @ coefficients`` is the TTFT.

    [requests, 7] in the order of ``COEFFICIENTS``; NaN where there is no such latency. Of the step during which a
    request arrives the part counts that is left.
    """

    outcomes: list[Outcome]
    ttft: Floats
    tpot: Floats


def breakdown(requests: Sequence[SimulatedRequest], model: GpuModel, *, prefix_cache: bool = True) -> Breakdown:
    """Simulates one replica and takes its latencies apart."""
    steps: list[tuple[float, float, StepWork]] = []

    def note(begin: float, end: float, work: StepWork) -> None:
        if end > begin:
            steps.append((begin, end, work))

    outcomes = simulate(requests, model, prefix_cache=prefix_cache, on_step=note)
    ttft = np.full((len(outcomes), len(COEFFICIENTS)), np.nan)
    tpot = np.full_like(ttft, np.nan)
    served = [index for index, outcome in enumerate(outcomes) if outcome.tokens]
    if not served:
        return Breakdown(outcomes, ttft, tpot)
    begins, ends = (np.array([step[side] for step in steps]) for side in (0, 1))
    counts = _counts([work for _, _, work in steps], model.step_time)
    so_far = np.cumsum(counts, axis=0)
    way = model.request_s / 2
    arrived, first, last = (
        np.array([getattr(outcomes[index], name) for index in served]) for name in ("due", "first", "last")
    )
    of_first, of_last = (_nearest(ends, moment - way) for moment in (first, last))
    arrived = arrived + way
    at = np.searchsorted(ends, arrived, side="right")
    left = (ends[at] - np.maximum(begins[at], arrived)) / (ends[at] - begins[at])
    ttft[served] = so_far[of_first] - so_far[at] + counts[at] * left[:, None]
    ttft[served, REQUEST] = 1.0
    gaps = np.array([len(outcomes[index].tokens) - 1 for index in served])
    with np.errstate(invalid="ignore"):
        tpot[served] = (so_far[of_last] - so_far[of_first]) / np.where(gaps > 0, gaps, np.nan)[:, None]
    return Breakdown(outcomes, ttft, tpot)


def _nearest(ends: Floats, moments: Floats) -> NDArray[np.intp]:
    """Steps that end at these moments, up to rounding."""
    after = np.searchsorted(ends, moments).clip(1, max(1, len(ends) - 1))
    before = after - 1
    after = after.clip(0, len(ends) - 1)
    return np.where(moments - ends[before] < ends[after] - moments, before, after)


def _counts(works: Sequence[StepWork], step_time: StepTime) -> Floats:
    """[steps, 7]: how often each coefficient is in each step's duration."""
    counts = np.zeros((len(works), len(COEFFICIENTS)))
    for row, work in zip(counts, works, strict=True):
        below = step_time.weights_s >= work.tokens * step_time.token_s
        row[:-1] = (1, below, 0 if below else work.tokens, work.rows, work.kv_tokens, work.prompt_pairs)
    return counts
