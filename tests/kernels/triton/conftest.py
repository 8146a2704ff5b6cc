"""Triton kernels run on the GPU when there is one, else under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ON_GPU = False
collect_ignore_glob = ["test_*.py"]
if find_spec("torch") and find_spec("triton"):
    import torch

    collect_ignore_glob = []
    ON_GPU = torch.cuda.is_available()

if not ON_GPU and not collect_ignore_glob:
    import interpreted  # noqa: F401

TOLERANCE = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 1e-2}
"""Relative error by dtype of the result. The interpreter gets dots in bfloat16 wrong, so they need a GPU."""


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture(params=[name for name in TOLERANCE if ON_GPU or name != "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The model's dtype."""
    return getattr(torch, request.param)


@pytest.fixture
def rng(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(7)


@pytest.fixture(scope="session")
def check_close() -> Callable[..., None]:
    """``check_close(actual, expected, tolerance=None)``: same shape, finite, small relative error of the whole.

    The tolerance follows from the dtype of ``actual`` unless it is given.
    """

    def check(actual: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
        assert actual.shape == expected.shape
        wide, expected = actual.double(), expected.double()
        assert torch.isfinite(wide).all()
        error = ((wide - expected).norm() / expected.norm().clamp_min(1e-30)).item()
        limit = TOLERANCE[str(actual.dtype).removeprefix("torch.")] if tolerance is None else tolerance
        assert error < limit, f"relative error {error:.2e}, at most {limit:.0e} is allowed"

    return check
