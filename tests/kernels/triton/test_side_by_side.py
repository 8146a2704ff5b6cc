"""Jobs in threads of their own."""

import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from triton.runtime._async_compile import active_mode

from paceline.kernels.triton.side_by_side import side_by_side


def test_all_are_done_twice_in_inference_mode():
    done: list[tuple[int, bool]] = []
    shares = list(side_by_side([lambda i=i: done.append((i, torch.is_inference_mode_enabled())) for i in range(20)]))
    assert sorted(done) == sorted([(i, True) for i in range(20)] * 2)
    assert shares == [1.0]


def test_a_kernel_is_compiled_before_it_is_launched():
    """By hand, as there may be no GPU: what Triton asks of the mode when it launches a kernel that it does not know."""
    compiled, launched, known = [], [], {}

    def launch(name: str) -> None:
        kernel = known.get(name)
        if kernel is None:
            mode = active_mode.get()
            assert mode is not None, f"{name} was not compiled ahead"
            kernel = mode.submit(
                name, lambda: compiled.append(name) or kernel_of(name), partial(known.__setitem__, name)
            )
        kernel.run(1, 1, 1, None, kernel.function, kernel.packed_metadata, kernel.launch_metadata(1, None), None, None)

    def kernel_of(name: str) -> SimpleNamespace:
        return SimpleNamespace(
            launch_metadata=lambda *_: None, run=lambda *_: launched.append(name), function=None, packed_metadata=None
        )

    shares = list(side_by_side([lambda: (launch("one"), launch("two")), lambda: (launch("one"), launch("three"))]))
    assert sorted(compiled) == ["one", "three", "two"]
    assert sorted(launched) == ["one", "one", "three", "two"]
    assert shares == [0.25, 0.5, 0.75, 1.0]


def test_jobs_overlap():
    meet = threading.Barrier(2, timeout=20)
    assert list(side_by_side([meet.wait, meet.wait])) == [1.0]


def test_an_error_is_raised():
    def fail():
        raise ValueError("does not compile")

    with pytest.raises(ValueError, match="does not compile"):
        list(side_by_side([lambda: None, fail]))
    assert list(side_by_side([lambda: None])) == [1.0]
