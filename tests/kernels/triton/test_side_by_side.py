"""Jobs in threads of their own."""

import threading

import pytest
import torch

from paceline.kernels.triton.side_by_side import side_by_side


def test_all_are_done_in_inference_mode():
    done, signs = set(), 0
    for _ in side_by_side([lambda i=i: done.add((i, torch.is_inference_mode_enabled())) for i in range(20)]):
        signs += 1
    assert done == {(i, True) for i in range(20)}
    assert signs == 20


def test_jobs_overlap():
    meet = threading.Barrier(2, timeout=20)
    assert len(list(side_by_side([meet.wait, meet.wait]))) == 2


def test_an_error_is_raised():
    def fail():
        raise ValueError("does not compile")

    with pytest.raises(ValueError, match="does not compile"):
        list(side_by_side([lambda: None, fail]))
    assert len(list(side_by_side([lambda: None]))) == 1
