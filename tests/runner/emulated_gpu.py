"""A stand-in for a GPU, on which the runner of GPUs works: streams do everything at once, models are computed by the
backends of CPUs, the runner's own kernels are interpreted, and captured pieces launch the same operators on the same
memory again.

What only a GPU can show is left out: its own backends, dependent launch, memory that graphs share, real concurrency.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import interpreted  # noqa: F401
from paceline.layers.kv_cache import KVCache
from paceline.runner import decode_graphs, gpu, gpu_step, graph_pool, make_runner, piece_graphs
from paceline.runner.decode_graphs import DecodeGraphs

GIB = 1 << 30
FIRST = (1, 2, 4)


class Graph:
    """Operators that can be launched again."""

    def __init__(self) -> None:
        self.launches: list[Callable[[], None]] = []
        self._capture = Capture(self)

    def capture_begin(self, pool: object) -> None:
        self._capture.__enter__()

    def capture_end(self) -> None:
        self._capture.__exit__(None, None, None)

    def replay(self) -> None:
        for launch in self.launches:
            launch()


class Capture(TorchDispatchMode):
    """Adds what it sees to a graph, and carries it out."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))

        def launch() -> None:
            again = func(*args, **(kwargs or {}))
            for old, new in zip(tree_leaves(results), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        self._graph.launches.append(launch)
        return results


@contextmanager
def stream(_: object) -> Iterator[None]:
    yield


def cuda() -> SimpleNamespace:
    """As much of ``torch.cuda`` as the runner uses."""
    done = SimpleNamespace(record=lambda: None, synchronize=lambda: None, wait_stream=lambda other: None)
    return SimpleNamespace(
        current_device=lambda: 0,
        current_stream=lambda: done,
        empty_cache=lambda: None,
        get_device_name=lambda device: "emulated",
        graph_pool_handle=lambda: None,
        is_available=lambda: True,
        max_memory_allocated=lambda device: 1 << 20,
        mem_get_info=lambda device: (4 * GIB, 8 * GIB),
        memory_allocated=lambda device: 0,
        reset_peak_memory_stats=lambda device: None,
        stream=stream,
        synchronize=lambda: None,
        CUDAGraph=Graph,
        Event=lambda: done,
        Stream=lambda device: done,
    )


class Torch:
    """``torch`` as the runner sees it."""

    def __init__(self) -> None:
        self.cuda = cuda()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, *_: object) -> torch.device:
        return torch.device("cpu")

    def empty(self, *size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return torch.empty(*size, **options)


class Decodes(DecodeGraphs):
    """Attention on a CPU looks at the rows, so whole steps are computed anew."""

    def capture(self) -> None:
        self._captured = sorted([*self._captured, self.waiting.pop(0)])

    def replay(self, size: int) -> tuple[Tensor, Tensor]:
        return self._forward(size)


@pytest.fixture
def emulated_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """``device="cuda"`` is there."""
    shim = Torch()
    for module in (gpu, gpu_step, graph_pool, make_runner):
        monkeypatch.setattr(module, "torch", shim)
    write = KVCache.write
    monkeypatch.setattr(KVCache, "write", lambda self, layer, slots, data: write(self, layer, slots.long(), data))
    monkeypatch.setattr(piece_graphs, "alias", lambda tensor: tensor)
    monkeypatch.setattr(decode_graphs, "FIRST", FIRST)
    for name, stand_in in {
        "DecodeGraphs": Decodes,
        "FIRST": FIRST,
        "graph_sizes": lambda most: [size for size in (*FIRST, 6) if size <= most],
        "overlaps": lambda tokens: False,
        "pinned": lambda array: torch.from_numpy(array.copy()),
        "side_by_side": lambda jobs: [1.0 for job in jobs if job() is not jobs],
        "upload": lambda array, device: torch.from_numpy(array.copy()),
    }.items():
        monkeypatch.setattr(gpu, name, stand_in)
