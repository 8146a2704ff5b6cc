"""Linear layers: how a weight is kept and multiplied is a method's choice."""

from bisect import bisect_left
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class LinearMethod(Protocol):
    """One way to keep a weight and to multiply by it."""

    name: str

    def serves(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether it works on this device for weights and activations of this dtype."""

    def prepare(self, weight: Tensor) -> Tensor:
        """The weight ``[out, in]`` in the form that `apply` takes."""

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``x @ weight.T + bias``: ``[T, in]`` to ``[T, out]``."""


class Dense:
    """The weight as it is, multiplied by torch. Serves everything."""

    name = "dense"

    def serves(self, device: torch.device, dtype: torch.dtype) -> bool:
        return True

    def prepare(self, weight: Tensor) -> Tensor:
        return weight

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)


class Packed:
    """The weight in oneDNN's blocked layout, by the operators that torch.compile uses on a CPU.

    Meant for few tokens, where reading the weight is what takes the time.

    oneDNN compiles code for every number of tokens and keeps it, a megabyte or more each. So only ``SIZES`` are
    computed: more tokens in parts, others with rows of zeros added.
    """

    name = "packed"
    SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)

    def serves(self, device: torch.device, dtype: torch.dtype) -> bool:
        if device.type != "cpu" or not torch.backends.mkldnn.is_available():
            return False
        operators = torch.ops.mkldnn
        if not hasattr(operators, "_reorder_linear_weight") or not hasattr(operators, "_linear_pointwise"):
            return False
        if dtype == torch.bfloat16:
            return bool(operators._is_mkldnn_bf16_supported())
        if dtype == torch.float16:
            return bool(operators._is_mkldnn_fp16_supported())
        return dtype == torch.float32

    def prepare(self, weight: Tensor) -> Tensor:
        return torch.ops.mkldnn._reorder_linear_weight(weight)

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        tokens = len(x)
        if tokens > self.SIZES[-1]:
            return torch.cat([self.apply(part, weight, bias) for part in x.split(self.SIZES[-1])])
        size = self.SIZES[bisect_left(self.SIZES, tokens)]
        if size > tokens:
            x = F.pad(x, (0, 0, 0, size - tokens))
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")[:tokens]


METHODS: tuple[LinearMethod, ...] = (Packed(), Dense())
"""Best first."""


def linear_method(device: torch.device, dtype: torch.dtype) -> LinearMethod:
    """The first method that serves."""
    return next(method for method in METHODS if method.serves(device, dtype))


class Linear:
    """A weight and its method. Called with ``[T, in]``, gives ``[T, out]``."""

    __slots__ = ("_apply", "bias", "weight")

    def __init__(self, method: LinearMethod, weight: Tensor, bias: Tensor | None = None) -> None:
        self._apply = method.apply
        self.weight = method.prepare(weight)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return self._apply(x, self.weight, self.bias)
