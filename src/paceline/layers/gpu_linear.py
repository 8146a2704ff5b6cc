"""Linear layers on a GPU: Triton kernels for few tokens, the libraries for many."""

from dataclasses import dataclass

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

_DTYPES = {torch.bfloat16: "bf16"}
"""As the table names them; the products of other dtypes are left to cuBLAS."""


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

    one_token: str
    """What the table calls the layers of one token."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices

    def norm(self, delta: Tensor | None, residual: Tensor, gain: Tensor, eps: float) -> Tensor:
        pdl = overlaps(len(residual))
        if delta is None:
            return rms_norm(residual, gain, eps, pdl=pdl)
        return add_rms_norm(delta, residual, gain, eps, pdl=pdl)

    def _one(
        self, delta: Tensor | None, residual: Tensor, gain: Tensor, eps: float, weight: Tensor
    ) -> tuple[Tensor | Unnormalised, Tensor]:
        """`LinearMethod.normalise` for one token that is not quantised."""
        if not self.choices.fuses_norm(weight, self.one_token):
            return self.norm(delta, residual, gain, eps), residual
        total = residual if delta is None else torch.empty_like(residual)
        return Unnormalised(delta, residual, total, gain, eps), total

    def _gemv(
        self,
        x: Tensor | Unnormalised,
        weight: Tensor,
        bias: Tensor | None,
        *,
        scale: Tensor | None = None,
        gated: bool = False,
    ) -> Tensor | None:
        """The product of one token by `gemv`; None where the table says otherwise."""
        op, n, k = "gate_up" if gated else "linear", len(weight) // (2 if gated else 1), weight.shape[1]
        if isinstance(x, Tensor):
            choice = self.choices.of(op, len(x), n, k, self.one_token)
            if not isinstance(choice, GemvConfig):
                return None
            return gemv(x, weight, weight_scale=scale, bias=bias, gated=gated, config=choice, pdl=True)
        choice = self.choices.of(f"norm_{op}", 1, n, k, self.one_token)
        assert isinstance(choice, GemvConfig), "a table has norms in front of products by gemv alone"
        return gemv(
            x.residual,
            weight,
            norm_weight=x.gain,
            eps=x.eps,
            delta=x.delta,
            sum_out=None if x.delta is None else x.total,
            weight_scale=scale,
            bias=bias,
            gated=gated,
            config=choice,
            pdl=True,
        )


class DenseGPU(_GPU):
    """Weights in the model's dtype."""

    name = "dense-gpu"
    one_token = "bf16"

    def serves(self, device: torch.device, dtype: torch.dtype) -> bool:
        return device.type == "cuda"

    def prepare(self, weight: Tensor) -> Tensor:
        return weight

    def normalise(
        self, delta: Tensor | None, residual: Tensor, gain: Tensor, eps: float, weight: Tensor
    ) -> tuple[Tensor | Unnormalised, Tensor]:
        if len(residual) == 1 and weight.dtype == torch.bfloat16:
            return self._one(delta, residual, gain, eps, weight)
        return self.norm(delta, residual, gain, eps), residual

    def apply(self, x: Tensor | Unnormalised, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._product(x, weight, bias, "linear")

    def gated(self, x: Tensor | Unnormalised, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._product(x, weight, bias, "gate_up")

    def _product(self, x: Tensor | Unnormalised, weight: Tensor, bias: Tensor | None, op: str) -> Tensor:
        gated = op == "gate_up"
        dtype = _DTYPES.get(weight.dtype)
        if dtype is not None and (found := self._gemv(x, weight, bias, gated=gated)) is not None:
            return found
        assert isinstance(x, Tensor)
        rows, k = x.shape
        choice = None if dtype is None else self.choices.of(op, rows, len(weight) // (2 if gated else 1), k, dtype)
        if isinstance(choice, SkinnyConfig):
            return skinny_linear(x, weight, bias=bias, gated=gated, config=choice, pdl=True)
        if isinstance(choice, RingConfig):
            return ring_linear(x, weight, bias=bias, gated=gated, config=choice, pdl=True)
        product = F.linear(x, weight, bias)
        return silu_mul(product, pdl=overlaps(rows)) if gated else product


class Fp8GPU(_GPU):
    """FP8 weights. Tokens are quantised too, one scale each, but for the one for which the table says ``w8a16``."""

    name = "fp8-gpu"
    one_token = "w8a16"

    def serves(self, device: torch.device, dtype: torch.dtype) -> bool:
        return device.type == "cuda" and dtype == torch.bfloat16

    def prepare(self, weight: Fp8Weight) -> Fp8Weight:
        return weight

    def normalise(
        self, delta: Tensor | None, residual: Tensor, gain: Tensor, eps: float, weight: Fp8Weight
    ) -> tuple[Tensor | Unnormalised | Quantized, Tensor]:
        if len(residual) == 1:
            return self._one(delta, residual, gain, eps, weight.data)
        return add_rms_norm_fp8(delta, residual, gain, eps, pdl=overlaps(len(residual))), residual

    def apply(self, x: Tensor | Unnormalised | Quantized, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
        found = self._one_token(x, weight, bias, gated=False)
        if found is not None:
            return found
        tokens, scale = _quantized(x)
        found = self._few(tokens, scale, weight, bias, "linear")
        return fp8_linear(tokens, scale, weight.data, weight.scale, bias) if found is None else found

    def gated(self, x: Tensor | Unnormalised | Quantized, weight: Fp8Weight, bias: Tensor | None) -> Tensor | Quantized:
        found = self._one_token(x, weight, bias, gated=True)
        if found is not None:
            return found
        tokens, scale = _quantized(x)
        found = self._few(tokens, scale, weight, bias, "gate_up")
        if found is not None:
            return found
        both = fp8_linear(tokens, scale, weight.data, weight.scale, bias)
        return silu_mul_fp8(both, pdl=overlaps(len(tokens)))

    def _one_token(
        self, x: Tensor | Unnormalised | Quantized, weight: Fp8Weight, bias: Tensor | None, *, gated: bool
    ) -> Tensor | None:
        if isinstance(x, tuple) or (isinstance(x, Tensor) and len(x) != 1):
            return None
        return self._gemv(x, weight.data, bias, scale=weight.scale, gated=gated)

    def _few(self, x: Tensor, scale: Tensor, weight: Fp8Weight, bias: Tensor | None, op: str) -> Tensor | None:
        """The product of few tokens; None where the table leaves it to the library."""
        gated = op == "gate_up"
        n, k = len(weight.data) // (2 if gated else 1), weight.data.shape[1]
        choice = self.choices.of(op, len(x), n, k, "w8a8")
        scales = {"x_scale": scale, "weight_scale": weight.scale}
        if isinstance(choice, SkinnyConfig):
            return skinny_linear(
                x, weight.data, bias=bias, **scales, gated=gated, config=choice, dtype=torch.bfloat16, pdl=True
            )
        if isinstance(choice, RingConfig):
            return ring_linear(
                x, weight.data, bias=bias, **scales, gated=gated, config=choice, dtype=torch.bfloat16, pdl=True
            )
        return None


def _quantized(x: Tensor | Unnormalised | Quantized) -> Quantized:
    if isinstance(x, Tensor):
        return quantize_tokens(x, pdl=overlaps(len(x)))
    assert isinstance(x, tuple)
    return x
