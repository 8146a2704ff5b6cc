"""Triton kernels run on the GPU when there is one, else under Triton's interpreter."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported and at each @triton.jit

    # Triton 3.6 turns the bounds of a loop, arrays of one element, into integers in a way that NumPy 2.4 refuses.
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: type, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_and_index

# Left out of the interpreter's runs: it gets dots in bfloat16 wrong.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 1e-2}
"""Relative error by dtype of the result."""


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The model's dtype."""
    return request.param


@pytest.fixture
def rng(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(7)


@pytest.fixture(scope="session")
def check_close() -> Callable[..., None]:
    """``check_close(actual, expected, tolerance=None)``: same shape, finite, error small.

    The tolerance follows from the dtype of ``actual`` unless it is given.
    """

    def check(actual: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
        assert actual.shape == expected.shape
        wide, expected = actual.double(), expected.double()
        assert torch.isfinite(wide).all()
        error = ((wide - expected).norm() / expected.norm().clamp_min(1e-30)).item()
        limit = TOLERANCE[actual.dtype] if tolerance is None else tolerance
        assert error < limit, f"relative error {error:.2e}, at most {limit:.0e} is allowed"

    return check
