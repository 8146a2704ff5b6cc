"""A stand-in for a GPU, on which the runner of GPUs works: streams do everything at once, models are computed by the
backends of CPUs, the runner's own kernels are interpreted, and captured steps are computed anew.

What only a GPU can show is left out: its own backends, dependent launch, memory that graphs share, real concurrency.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import interpreted  # noqa: F401
from paceline.layers.kv_cache import KVCache
from paceline.runner import decode_steps, gpu, gpu_step, graph_pool, make_runner, mixed_steps
from paceline.runner.step_graphs import Shape, StepGraphs

GIB = 1 << 30
FIRST = (1, 2, 4)


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


class Steps(StepGraphs):
    """Attention on a CPU looks at the rows, so that steps are computed anew, from the memory that a graph reads."""

    def capture(self, forward: Callable[..., tuple[Tensor, ...]]) -> None:
        self._forward = forward
        self._captured = sorted([*self._captured, self.waiting.pop(0)])

    def replay(self, shape: Shape) -> tuple[Tensor, ...]:
        return self._forward(*shape)


@pytest.fixture
def emulated_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """``device="cuda"`` is there."""
    shim = Torch()
    for module in (gpu, gpu_step, graph_pool, make_runner):
        monkeypatch.setattr(module, "torch", shim)
    write = KVCache.write
    monkeypatch.setattr(KVCache, "write", lambda self, layer, slots, data: write(self, layer, slots.long(), data))
    stand_ins = {
        "StepGraphs": Steps,
        "FIRST": FIRST,
        "decode_shapes": lambda most: [(size,) for size in (*FIRST, 6) if size <= most],
        "overlaps": lambda tokens: False,
        "pinned": lambda array: torch.from_numpy(array.copy()),
        "side_by_side": lambda jobs: [1.0 for job in jobs if job() is not jobs],
        "upload": lambda array, device: torch.from_numpy(array.copy()),
    }
    for module in (gpu, decode_steps, mixed_steps):
        for name in stand_ins.keys() & vars(module).keys():
            monkeypatch.setattr(module, name, stand_ins[name])
