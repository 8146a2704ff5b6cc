"""Linear layers on a GPU: Triton kernels for few tokens, the libraries for many."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.table import (
    Choice,
    GemvConfig,
    LinearShape,
    LinearTable,
    RingConfig,
    SkinnyConfig,
)
from paceline.kernels.triton.activation import silu_mul, silu_mul_fp8
from paceline.kernels.triton.fp8 import fp8_linear, quantize_tokens
from paceline.kernels.triton.gemv import gemv
from paceline.kernels.triton.norm import add_rms_norm, add_rms_norm_fp8, rms_norm
from paceline.kernels.triton.ring_linear import ring_linear
from paceline.kernels.triton.skinny_linear import MAX_ROWS, skinny_linear
from paceline.layers.fp8_weight import Fp8Weight

Quantized = tuple[Tensor, Tensor]
"""Tokens in float8_e4m3fn ``[T, K]``, and their scales, float32 ``[T]``."""

OVERLAP_ROWS = 128
"""Steps of more tokens gain nothing from dependent launch."""


def overlaps(tokens: int) -> bool:
    """Whether the kernels of a step of so many tokens start while the one before still runs."""
    return tokens <= OVERLAP_ROWS


@dataclass(frozen=True, slots=True)
class Unnormalised:
    """One token whose norm the layer that takes it computes."""

    delta: Tensor | None
    residual: Tensor
    total: Tensor
    """Where the sum of both goes."""
    gain: Tensor
    eps: float


class Choices:
    """What a table says, remembered."""

    def __init__(self, table: LinearTable | None) -> None:
        self._table = table
        self._known: dict[LinearShape, Choice | None] = {}

    def of(self, op: str, rows: int, n: int, k: int, dtype: str) -> Choice | None:
        """None: nobody measured this shape."""
        if rows > MAX_ROWS or self._table is None:
            return None
        shape = LinearShape(op, rows, n, k, dtype)
        if shape not in self._known:
            self._known[shape] = self._table.choose(shape)
        return self._known[shape]

    def fuses_norm(self, weight: Tensor, dtype: str) -> bool:
        """Whether the layer of this weight had better compute the norm of one token itself."""
        n, k = weight.shape
        return (
            self.of("norm_linear", 1, n, k, dtype) is not None
            or self.of("norm_gate_up", 1, n // 2, k, dtype) is not None
        )


class _GPU:
    """What both kinds of weights have in common."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices

    def norm(self, delta: Tensor | None, residual: Tensor, gain: Tensor, eps: float) -> Tensor:
        pdl = overlaps(len(residual))
        if delta is None:
            return rms_norm(residual, gain, eps, pdl=pdl)
        return add_rms_norm(delta, residual, gain, eps, pdl=pdl)

    def _unquantised(
        self, delta: Tensor | None, residual: Tensor, gain: Tensor, eps: float, weight: Tensor, dtype: str
    ) -> tuple[Tensor | Unnormalised, Tensor]:
        """`LinearMethod.normalise` to what the table calls ``dtype``."""
        if len(residual) > 1 or not self.choices.fuses_norm(weight, dtype):
            return self.norm(delta, residual, gain, eps), residual
        total = residual if delta is None else torch.empty_like(residual)
        return Unnormalised(delta, residual, total, gain, eps), total

    def _tabled(
        self,
        x: Tensor | Unnormalised,
        weight: Tensor,
        bias: Tensor | None,
        dtype: str,
        *,
        gated: bool,
        x_scale: Tensor | None = None,
        weight_scale: Tensor | None = None,
    ) -> Tensor | None:
        """The product by the kernel that the table names; None where it leaves it to the library."""
        op, n, k = "gate_up" if gated else "linear", len(weight) // (2 if gated else 1), weight.shape[1]
        options: dict[str, Any] = {"bias": bias, "weight_scale": weight_scale, "gated": gated, "pdl": True}
        if isinstance(x, Unnormalised):
            choice = self.choices.of(f"norm_{op}", 1, n, k, dtype)
            assert isinstance(choice, GemvConfig), "tables name gemv alone for a norm in front"
            added: dict[str, Any] = {} if x.delta is None else {"delta": x.delta, "sum_out": x.total}
            return gemv(x.residual, weight, norm_weight=x.gain, eps=x.eps, config=choice, **added, **options)
        choice = self.choices.of(op, len(x), n, k, dtype)
        if isinstance(choice, GemvConfig):
            return gemv(x, weight, config=choice, **options)
        if isinstance(choice, SkinnyConfig):
            return skinny_linear(x, weight, x_scale=x_scale, config=choice, **options)
        if isinstance(choice, RingConfig):
            return ring_linear(x, weight, x_scale=x_scale, config=choice, **options)
        return None


class DenseGPU(_GPU):
    """Weights in the model's dtype. Tables know bfloat16; the products of other dtypes are left to the library."""

    name = "dense-gpu"

    def serves(self, device: torch.device, dtype: torch.dtype) -> bool:
        return device.type == "cuda"

    def prepare(self, weight: Tensor) -> Tensor:
        return weight

    def normalise(
        self, delta: Tensor | None, residual: Tensor, gain: Tensor, eps: float, weight: Tensor
    ) -> tuple[Tensor | Unnormalised, Tensor]:
        if weight.dtype != torch.bfloat16:
            return self.norm(delta, residual, gain, eps), residual
        return self._unquantised(delta, residual, gain, eps, weight, "bf16")

    def apply(self, x: Tensor | Unnormalised, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._product(x, weight, bias, gated=False)

    def gated(self, x: Tensor | Unnormalised, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._product(x, weight, bias, gated=True)

    def _product(self, x: Tensor | Unnormalised, weight: Tensor, bias: Tensor | None, *, gated: bool) -> Tensor:
        found = self._tabled(x, weight, bias, "bf16", gated=gated) if weight.dtype == torch.bfloat16 else None
        if found is not None:
            return found
        assert isinstance(x, Tensor)
        product = F.linear(x, weight, bias)
        return silu_mul(product, pdl=overlaps(len(x))) if gated else product


class Fp8GPU(_GPU):
    """FP8 weights. Tokens are quantised too, one scale each, but for a single one where the table has ``w8a16``."""

    name = "fp8-gpu"

    def serves(self, device: torch.device, dtype: torch.dtype) -> bool:
        return device.type == "cuda" and dtype == torch.bfloat16

    def prepare(self, weight: Fp8Weight) -> Fp8Weight:
        return weight

    def normalise(
        self, delta: Tensor | None, residual: Tensor, gain: Tensor, eps: float, weight: Fp8Weight
    ) -> tuple[Tensor | Unnormalised | Quantized, Tensor]:
        if len(residual) == 1:
            return self._unquantised(delta, residual, gain, eps, weight.data, "w8a16")
        return add_rms_norm_fp8(delta, residual, gain, eps, pdl=overlaps(len(residual))), residual

    def apply(self, x: Tensor | Unnormalised | Quantized, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
        product = self._product(x, weight, bias, gated=False)
        return fp8_linear(*product, weight.data, weight.scale, bias) if isinstance(product, tuple) else product

    def gated(self, x: Tensor | Unnormalised | Quantized, weight: Fp8Weight, bias: Tensor | None) -> Tensor | Quantized:
        product = self._product(x, weight, bias, gated=True)
        if isinstance(product, Tensor):
            return product
        both = fp8_linear(*product, weight.data, weight.scale, bias)
        return silu_mul_fp8(both, pdl=overlaps(len(both)))

    def _product(
        self, x: Tensor | Unnormalised | Quantized, weight: Fp8Weight, bias: Tensor | None, *, gated: bool
    ) -> Tensor | Quantized:
        """As the table says; quantised tokens where it leaves the product to the library."""
        if isinstance(x, Unnormalised) or (isinstance(x, Tensor) and len(x) == 1):
            found = self._tabled(x, weight.data, bias, "w8a16", gated=gated, weight_scale=weight.scale)
            if found is not None:
                return found
        assert not isinstance(x, Unnormalised)
        tokens, scale = quantize_tokens(x, pdl=overlaps(len(x))) if isinstance(x, Tensor) else x
        found = self._tabled(tokens, weight.data, bias, "w8a8", gated=gated, x_scale=scale, weight_scale=weight.scale)
        return (tokens, scale) if found is None else found
