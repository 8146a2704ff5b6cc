"""Which steps are captured, and which captured one serves a step."""

from itertools import pairwise

import pytest

from paceline.runner.graph_shapes import FIRST, SINGLES, decode_shapes, mixed_shapes
from paceline.runner.step_graphs import StepGraphs


@pytest.mark.parametrize("most", [1, 6, 16, 100, 1000, 1024])
def test_decode_shapes(most):
    sizes = [size for (size,) in decode_shapes(most)]
    assert len(set(sizes)) == len(sizes)
    assert max(sizes) == most
    before = [size for size in sizes if size in FIRST or size == most]
    assert sizes[: len(before)] == sorted(before, reverse=True)
    ordered = sorted(sizes)
    assert all(two - one <= max(1, one // 8) or two <= 64 for one, two in pairwise(ordered))


def test_mixed_shapes():
    assert mixed_shapes(100, 64) == []
    assert mixed_shapes(200, 16) == [(200, 16), (192, 16), (128, 16)]
    assert mixed_shapes(200, 17) == [(200, 64), (200, 16), (192, 64), (192, 16), (128, 64), (128, 16)]
    full = mixed_shapes(8448, 1024)
    assert full[0] == (1024, SINGLES[-1])
    assert all(singles <= tokens for tokens, singles in full)
    assert (256, 256) in full
    assert (192, 256) not in full
    assert max(mixed_shapes(1000, 1024)) == (1000, 256)


def test_the_smallest_that_holds_all():
    graphs = StepGraphs([], None)
    graphs._captured = [(128, 16), (128, 64), (192, 16), (192, 64), (256, 256)]
    for needs, shape in {
        (1, 0): (128, 16),
        (128, 17): (128, 64),
        (129, 16): (192, 16),
        (129, 65): (256, 256),
        (192, 64): (192, 64),
        (257, 1): None,
        (10, 257): None,
    }.items():
        assert graphs.fit(*needs) == shape
