"""Jobs that launch kernels which are not compiled yet."""

import pytest
import torch
import triton
import triton.language as tl

from paceline.kernels.triton.side_by_side import side_by_side

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@triton.jit
def _put(target, VALUE: tl.constexpr):
    tl.store(target + VALUE, tl.load(target + VALUE) + VALUE)


def test_kernels_are_compiled_once_and_then_launched():
    target = torch.zeros(8, dtype=torch.int32, device="cuda")
    jobs = [lambda value=value % 8: _put[(1,)](target, VALUE=value) for value in range(16)]
    shares = list(side_by_side(jobs))
    torch.cuda.synchronize()
    assert target.tolist() == [2 * value for value in range(8)]
    assert len(shares) == 9
    assert list(side_by_side(jobs)) == [1.0]
    torch.cuda.synchronize()
    # Four more of each: what is compiled is launched the first time too.
    assert target.tolist() == [6 * value for value in range(8)]


def test_what_does_not_compile_is_raised():
    target = torch.zeros(8, dtype=torch.int32, device="cuda")
    with pytest.raises(Exception, match=r"VALUE|arange|power of 2"):
        list(side_by_side([lambda: _wrong[(1,)](target, VALUE=3)]))


@triton.jit
def _wrong(target, VALUE: tl.constexpr):
    tl.store(target + tl.arange(0, VALUE), 0)
