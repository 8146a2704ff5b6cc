"""Linear layers: how a weight is kept and multiplied, and how its input is made, is a method's choice."""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.activation import silu_mul
from paceline.kernels.fp8 import fp8_linear_reference, quantize_rows
from paceline.kernels.norm import rms_norm
from paceline.kernels.table import shipped_table
from paceline.layers.fp8_weight import Fp8Weight

Weight = Tensor | Fp8Weight


class LinearMethod(Protocol):
    """One way to keep a weight and to multiply by it.

    What goes in is made by the method of the layer that takes it, because some fuse its quantisation: an *operand* is a
    tensor ``[T, in]``, or what the method's own `normalise` and `gated` give.
    """

    name: str

    def serves(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether it works on this device for activations of this dtype."""

    def prepare(self, weight: Any) -> Any:
        """The weight ``[out, in]`` in the form that `apply` takes."""

    def norm(self, delta: Tensor | None, residual: Tensor, gain: Tensor, eps: float) -> Tensor:
        """Adds ``delta`` to the residual stream, in place, and normalises the sum (RMSNorm).

        Args:
            delta: what the last layer's `apply` gave; None: there is nothing to add.
            residual: ``[T, in]``.
            gain: the norm's weight, ``[in]``.
        """

    def normalise(
        self, delta: Tensor | None, residual: Tensor, gain: Tensor, eps: float, weight: Any
    ) -> tuple[Any, Tensor]:
        """`norm` to an operand for this weight, and the residual stream from here on: in place, or a new tensor that
        is complete once the operand has been used."""

    def apply(self, x: Any, weight: Any, bias: Tensor | None) -> Tensor:
        """``x @ weight.T + bias``: an operand to ``[T, out]``, or to partial sums ``[splits, T, out]`` in float32,
        which the same device's `normalise` and attention take."""

    def gated(self, x: Any, weight: Any, bias: Tensor | None) -> Any:
        """``silu`` of the first half of `apply` times the second: an operand ``[T, out / 2]``."""


class Plain(ABC):
    """Operands are tensors."""

    def norm(self, delta: Tensor | None, residual: Tensor, gain: Tensor, eps: float) -> Tensor:
        return rms_norm(residual if delta is None else residual.add_(delta), gain, eps)

    def normalise(
        self, delta: Tensor | None, residual: Tensor, gain: Tensor, eps: float, weight: Any
    ) -> tuple[Tensor, Tensor]:
        return self.norm(delta, residual, gain, eps), residual

    @abstractmethod
    def apply(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor: ...

    def gated(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        return silu_mul(self.apply(x, weight, bias))


class Dense(Plain):
    """The weight as it is, multiplied by torch. Serves everything."""

    name = "dense"

    def serves(self, device: torch.device, dtype: torch.dtype) -> bool:
        return True

    def prepare(self, weight: Tensor) -> Tensor:
        return weight

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)


class Fp8Reference(Plain):
    """FP8 weights and dynamically quantised tokens, multiplied in float32. Slow; serves everything."""

    name = "fp8-reference"

    def serves(self, device: torch.device, dtype: torch.dtype) -> bool:
        return True

    def prepare(self, weight: Fp8Weight) -> Fp8Weight:
        return weight

    def apply(self, x: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
        return fp8_linear_reference(*quantize_rows(x), weight.data, weight.scale, bias, x.dtype)


class Packed(Plain):
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
"""For weights in the model's dtype, best first."""


def linear_method(device: torch.device, dtype: torch.dtype, weight: type[Weight] = Tensor) -> LinearMethod:
    """The first method that serves weights of this kind."""
    methods: list[LinearMethod] = [Fp8Reference()] if weight is Fp8Weight else list(METHODS)
    if device.type == "cuda":
        from paceline.layers.gpu_linear import Choices, DenseGPU, Fp8GPU

        choices = Choices(shipped_table(torch.cuda.get_device_name(device)))
        methods.insert(0, Fp8GPU(choices) if weight is Fp8Weight else DenseGPU(choices))
    return next(method for method in methods if method.serves(device, dtype))


class Linear:
    """A weight and its method: `normalise` makes its input, calling it gives ``[T, out]``; see `LinearMethod`."""

    __slots__ = ("_method", "bias", "weight")

    def __init__(self, method: LinearMethod, weight: Weight, bias: Tensor | None = None) -> None:
        self._method = method
        self.weight = method.prepare(weight)
        self.bias = bias

    def norm(self, delta: Tensor | None, residual: Tensor, gain: Tensor, eps: float) -> Tensor:
        return self._method.norm(delta, residual, gain, eps)

    def normalise(self, delta: Tensor | None, residual: Tensor, gain: Tensor, eps: float) -> tuple[Any, Tensor]:
        return self._method.normalise(delta, residual, gain, eps, self.weight)

    def __call__(self, x: Any) -> Tensor:
        return self._method.apply(x, self.weight, self.bias)

    def gated(self, x: Any) -> Any:
        return self._method.gated(x, self.weight, self.bias)

    def tensors(self) -> Iterator[Tensor]:
        """What it keeps in memory."""
        if isinstance(self.weight, Fp8Weight):
            yield from (self.weight.data, self.weight.scale)
        else:
            yield self.weight
        if self.bias is not None:
            yield self.bias
