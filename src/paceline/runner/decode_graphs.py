"""Captured decode steps: from the rows to the scores of their next tokens in one launch."""

from bisect import bisect_left
from collections.abc import Callable

import torch
from torch import Tensor

from paceline.runner.alias import alias
from paceline.runner.graph_pool import GraphPool

FIRST = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 640, 768, 896, 1024)
"""Captured before the engine is ready; the rest follows when there is nothing to do. Small steps read the weights,
whatever their number of rows; large ones take time for each row."""


def graph_sizes(most: int) -> list[int]:
    """Batch sizes worth a graph of their own: dense where a few rows more cost much of a step."""
    steps = [*range(1, 16), *range(16, 64, 4), *range(64, 128, 8), *range(128, 512, 16), *range(512, 1025, 32)]
    return [size for size in steps if size < most] + [most] if most < 1024 else steps


class DecodeGraphs:
    """Graphs by batch size. They share one pool of memory, since no two ever run at once.

    Attributes:
        waiting: sizes still to be captured.
    """

    def __init__(self, forward: Callable[[int], tuple[Tensor, Tensor]], sizes: list[int], pool: GraphPool) -> None:
        """
        Args:
            forward: ``forward(size)`` launches a step of ``size`` rows that reads the same memory every time; gives its
                hidden states and scores.
        """
        self._forward, self._pool = forward, pool
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        self._captured: list[int] = []
        # The largest first: smaller ones then find its memory in the pool.
        self.waiting = sorted(sizes, key=lambda size: (size not in FIRST and size != max(sizes), -size))

    @property
    def first(self) -> int:
        """How many of ``waiting`` belong before ready."""
        return sum(1 for size in self.waiting if size in FIRST or size == max(self.waiting))

    def fit(self, rows: int) -> int | None:
        """The smallest captured size that holds so many rows."""
        place = bisect_left(self._captured, rows)
        return self._captured[place] if place < len(self._captured) else None

    def capture(self) -> None:
        """Captures the next waiting size. Nothing may be under way."""
        size = self.waiting.pop(0)
        self._forward(size)  # compiles what is not compiled yet
        with self._pool.capture() as graph:
            hidden, logits = self._forward(size)
        self._graphs[size] = graph, alias(hidden), alias(logits)
        self._captured = sorted(self._graphs)

    def replay(self, size: int) -> tuple[Tensor, Tensor]:
        """Launches the step.

        Returns:
            Hidden states ``[size, hidden]`` and scores ``[size, vocab]``, valid until another graph of the pool is
            launched.
        """
        graph, hidden, logits = self._graphs[size]
        graph.replay()
        return hidden, logits

    def clear(self) -> None:
        self._graphs.clear()
        self._captured = []
