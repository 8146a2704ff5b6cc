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
    steps: "_Steps | None"
    """None: nothing was served."""

    def weights_at(self, knee: float) -> tuple[Floats, Floats]:
        """How often ``weights_s`` is in each TTFT and TPOT if steps of more than ``knee`` tokens take ``weights_s`` for
        every so many tokens; ``token_s`` then is in none. [requests] each."""
        if self.steps is None:
            return self.ttft[:, 0], self.tpot[:, 0]
        ttft, tpot = self.steps.sums(np.maximum(1.0, self.steps.tokens / knee)[:, None])
        return ttft[:, 0], tpot[:, 0]


@dataclass(frozen=True, slots=True)
class _Steps:
    """Which steps each latency is made of."""

    tokens: Floats
    """[steps]."""
    served: NDArray[np.bool_]
    """[requests]; the others have one entry for each that was."""
    at: NDArray[np.intp]
    """The step during which a request arrived, or the next one."""
    left: Floats
    """Part of that step that was left."""
    first: NDArray[np.intp]
    """The step that made its first token."""
    last: NDArray[np.intp]
    gaps: Floats
    """Between its tokens; NaN for none."""

    def sums(self, counts: Floats) -> tuple[Floats, Floats]:
        """Of counts a step, [steps, any]: their sums over each TTFT and each TPOT, [requests, any]."""
        so_far = np.cumsum(counts, axis=0)
        ttft = np.full((len(self.served), counts.shape[1]), np.nan)
        tpot = np.full_like(ttft, np.nan)
        ttft[self.served] = so_far[self.first] - so_far[self.at] + counts[self.at] * self.left[:, None]
        tpot[self.served] = (so_far[self.last] - so_far[self.first]) / self.gaps[:, None]
        return ttft, tpot


def breakdown(requests: Sequence[SimulatedRequest], model: GpuModel, *, prefix_cache: bool = True) -> Breakdown:
    """Simulates one replica and takes its latencies apart."""
    steps: list[tuple[float, float, StepWork]] = []

    def note(begin: float, end: float, work: StepWork) -> None:
        if end > begin:
            steps.append((begin, end, work))

    outcomes = simulate(requests, model, prefix_cache=prefix_cache, on_step=note)
    answered = [outcome for outcome in outcomes if outcome.tokens]
    if not answered:
        nothing = np.full((len(outcomes), len(COEFFICIENTS)), np.nan)
        return Breakdown(outcomes, nothing, nothing.copy(), None)
    begins, ends = (np.array([step[side] for step in steps]) for side in (0, 1))
    way = model.request_s / 2
    arrived, first, last = (
        np.array([getattr(outcome, name) for outcome in answered]) for name in ("due", "first", "last")
    )
    arrived = arrived + way
    at = np.searchsorted(ends, arrived, side="right")
    gaps = np.array([len(outcome.tokens) - 1 for outcome in answered], dtype=float)
    made_of = _Steps(
        tokens=np.array([work.tokens for _, _, work in steps], dtype=float),
        served=np.array([bool(outcome.tokens) for outcome in outcomes]),
        at=at,
        left=(ends[at] - np.maximum(begins[at], arrived)) / (ends[at] - begins[at]),
        first=_nearest(ends, first - way),
        last=_nearest(ends, last - way),
        gaps=np.where(gaps > 0, gaps, np.nan),
    )
    ttft, tpot = made_of.sums(_counts([work for _, _, work in steps], model.step_time))
    ttft[made_of.served, REQUEST] = 1.0
    return Breakdown(outcomes, ttft, tpot, made_of)


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
