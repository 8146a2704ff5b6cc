"""From arrays on the host to tensors on a device, without waiting."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def pinned(array: NDArray[Any]) -> Tensor:
    """A copy in memory that a GPU reads by itself."""
    return torch.from_numpy(array).pin_memory()


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array on the device, before whatever is launched next; the host does not wait. On a CPU it shares the
    array's memory."""
    if device.type != "cuda":
        return torch.from_numpy(array).to(device)
    return pinned(array).to(device, non_blocking=True)
