"""Captured steps: all that they launch in one launch."""

from bisect import bisect_left
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from paceline.runner.alias import alias
from paceline.runner.graph_pool import GraphPool

Shape = tuple[int, ...]
"""What a step holds at most, in each of some numbers."""


class StepGraphs:
    """Graphs of one kind of step by shape. They share one pool of memory, since no two ever run at once.

    Attributes:
        waiting: shapes still to be captured, in this order.
    """

    def __init__(self, shapes: Iterable[Shape], pool: GraphPool) -> None:
        """
        Args:
            shapes: the large ones first: smaller ones then find their memory in the pool.
        """
        self._pool = pool
        self._graphs: dict[Shape, tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]] = {}
        self._captured: list[Shape] = []
        self.waiting = list(shapes)

    def fit(self, *needs: int) -> Shape | None:
        """The first captured shape, in order of size, that holds so much."""
        place = bisect_left(self._captured, needs)
        for shape in self._captured[place:]:
            if all(need <= most for need, most in zip(needs, shape, strict=True)):
                return shape
        return None

    def capture(self, forward: Callable[..., tuple[Tensor, ...]]) -> None:
        """Captures the next waiting shape. Nothing may be under way.

        Args:
            forward: ``forward(*shape)`` launches a step that reads the same memory every time; gives its results, which
                are contiguous.
        """
        shape = self.waiting.pop(0)
        forward(*shape)  # compiles what is not compiled yet
        with self._pool.capture() as graph:
            results = forward(*shape)
        self._graphs[shape] = graph, tuple(map(alias, results))
        self._captured = sorted(self._graphs)

    def replay(self, shape: Shape) -> tuple[Tensor, ...]:
        """Launches the step.

        Returns:
            What `capture` was given gave, valid until another graph of the pool is launched.
        """
        graph, results = self._graphs[shape]
        graph.replay()
        return results

    def clear(self) -> None:
        self._graphs.clear()
        self._captured = []
