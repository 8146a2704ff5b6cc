"""Graphs that share memory."""

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MIB = 1 << 20


def test_graphs_find_what_those_before_them_freed_and_caches_stay():
    from paceline.runner.alias import alias
    from paceline.runner.graph_pool import GraphPool

    pool = GraphPool(torch.device("cuda", 0))
    with pool.capture() as first:  # takes memory for the state of the random generator
        pass
    x = torch.ones(16 * MIB, device="cuda")
    cached = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    del cached
    held, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    captured = []
    for factor in (1, 2, 3):
        with pool.capture() as graph:
            y = (x * factor).mean(0, keepdim=True)
        captured.append((factor, graph, alias(y)))
        del y
    assert len({result.data_ptr() for _, _, result in captured}) == 1
    assert torch.cuda.memory_allocated() == held
    # 64 MiB for the product, and what the allocator adds.
    assert reserved <= torch.cuda.memory_reserved() <= reserved + 80 * MIB
    del first
    for factor, graph, result in captured:
        graph.replay()
        assert result.item() == pytest.approx(factor)
