"""Tensors over memory that others own."""

import torch
from torch import Tensor


class _Memory:
    """A tensor's memory, by the protocol that torch reads it through."""

    def __init__(self, tensor: Tensor) -> None:
        assert tensor.is_contiguous()
        flat = tensor.view(torch.uint8).flatten()
        self.__cuda_array_interface__ = {
            "data": (flat.data_ptr(), False),
            "shape": tuple(flat.shape),
            "typestr": "|u1",
            "version": 3,
        }


def alias(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor on a GPU, without keeping it alive: where a captured graph leaves a result that
    other graphs of the same pool may overwrite."""
    return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype).view(tensor.shape)
