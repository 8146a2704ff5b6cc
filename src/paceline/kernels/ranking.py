"""The largest values of each row, in an order that leaves nothing to chance."""

import torch
from torch import Tensor


def ranked(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` largest of each row, by (value descending, id ascending).

    `torch.topk` may return any of several equal values; here value and id form one integer key, so no two are equal.

    Args:
        values: float32 ``[R, V]`` without NaN.
        k: at most V.

    Returns:
        Values float32 ``[R, k]`` and ids int64 ``[R, k]``.
    """
    bits = (values + 0.0).view(torch.int32)  # the sum turns -0.0 into 0.0
    descending = ~(bits ^ ((bits >> 31) & 0x7FFFFFFF))
    keys = descending.to(torch.int64) << 32 | torch.arange(values.shape[-1], device=values.device)
    ids = keys.topk(k, largest=False, sorted=True).values & 0xFFFFFFFF
    return values.gather(-1, ids), ids
