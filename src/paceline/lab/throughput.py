"""How well one run tells a rate: throughput, requests/s, goodput."""

import math
from dataclasses import dataclass

import numpy as np

from paceline.lab.statistics import BLOCKS, Floats, t_quantile

ROUNDS = 3.0
"""Times that a request must fit into the window: what takes as long as the run is a single observation."""
TRIMMED = 0.05
"""Share of the work at the start and at the end that is not steady: queues fill, seats run empty."""
GRID = 256
"""Spans of the window in which that share is looked up."""
MOST_CORRELATED = 0.8
"""Of neighbouring blocks, as far as it can be estimated from `BLOCKS` of them."""


@dataclass(frozen=True, slots=True)
class Flow:
    """Completed requests, each as work that goes on evenly from its begin to its end, seconds from the stage's start.

    [requests] each.
    """

    begin: Floats
    end: Floats
    due: Floats | None
    """Where a schedule decides how much there is to do; None: where the engine does."""
    window_s: float

    def error(self, weights: Floats) -> float | None:
        """Half the 95% interval of the logarithm of (sum of the weights) / window; None where the run cannot tell.

        By batch means (Conway, 1963): the steady part is cut into `BLOCKS` equal spans, whose differences tell how far
        the whole may be off. Spans that resemble their neighbours are worth fewer: as many as independent ones would
        be, by their first-order autocorrelation (Bayley and Hammersley, 1946). What a schedule explains of the
        differences is no noise, for it is the same in every run, and is taken out as a control variate (Lavenberg and
        Welch, 1981): when its requests came, but not what they weighed.
        """
        if np.count_nonzero(weights) < BLOCKS or self.window_s < ROUNDS * float(np.median(self.end - self.begin)):
            return None
        edges = self._steady(weights)
        work = _work(edges, self.begin, self.end, weights)
        rests, freedom = work - work.mean(), BLOCKS - 1
        if self.due is not None:
            begins, ends = (self.due + (times - self.due).mean() for times in (self.begin, self.end))
            # The weights say what came of the requests, which another run of the schedule need not repeat.
            planned = _work(edges, begins, ends, np.full_like(weights, weights.mean()))
            planned -= planned.mean()
            if (spread := float(planned @ planned)) > 0:
                rests = rests - min(1.0, max(0.0, float(planned @ rests) / spread)) * planned
                freedom -= 1
        squares = float(rests @ rests)
        if squares == 0:
            return 0.0
        # Estimated from so few, the autocorrelation is too low by about 1 / BLOCKS.
        alike = min(MOST_CORRELATED, max(0.0, float(rests[1:] @ rests[:-1]) / squares + 1 / BLOCKS))
        worth = (1 - alike) / (1 + alike)
        deviation = math.sqrt(squares / freedom / worth) / float(work.mean())
        # The deviation is that of one span; the window has more of them than the steady part.
        spans = self.window_s / float(edges[1] - edges[0])
        return t_quantile(max(2.0, freedom * worth)) * deviation / math.sqrt(spans)

    def _steady(self, weights: Floats) -> Floats:
        """Ends of the spans."""
        grid = np.linspace(self.begin.min(), self.end.max(), GRID + 1)
        done = np.cumsum(_work(grid, self.begin, self.end, weights))
        low, high = np.interp([TRIMMED, 1 - TRIMMED], done / done[-1], grid[1:])
        return np.linspace(low, high, BLOCKS + 1)


def _work(edges: Floats, begin: Floats, end: Floats, weights: Floats) -> Floats:
    """What is done between each edge and the next."""
    spans = np.maximum(end - begin, 1e-9)
    return np.diff([float((np.clip((edge - begin) / spans, 0.0, 1.0) * weights).sum()) for edge in edges])
