"""Where the kernels of linear layers write."""

import torch
from torch import Tensor


def result_tensor(x: Tensor, n: int, splits: int, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """``[M, n]`` in ``dtype`` for the tokens ``x`` ``[M, K]``, or, where several programs share a row's sum, their
    parts: float32 ``[splits, M, n]``. It is ``out`` if given, which must be such a tensor, contiguous."""
    shape: tuple[int, ...] = (splits, len(x), n) if splits > 1 else (len(x), n)
    if splits > 1:
        dtype = torch.float32
    out = torch.empty(shape, dtype=dtype, device=x.device) if out is None else out
    assert out.is_contiguous()
    assert out.shape == shape
    assert out.dtype == dtype
    return out
