"""Linear layers on a GPU: Triton kernels for few tokens, the libraries for many."""

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.table import Choice, GemvConfig, LinearShape, LinearTable, SkinnyConfig, shipped_table
from paceline.kernels.triton.activation import silu_mul, silu_mul_fp8
from paceline.kernels.triton.fp8 import fp8_linear, quantize_tokens
from paceline.kernels.triton.gemv import gemv
from paceline.kernels.triton.norm import add_rms_norm, add_rms_norm_fp8, rms_norm
from paceline.kernels.triton.skinny_linear import MAX_ROWS, skinny_linear
from paceline.layers.fp8_weight import Fp8Weight

Quantized = tuple[Tensor, Tensor]
"""Tokens in float8_e4m3fn ``[T, K]``, and their scales, float32 ``[T]``."""

OVERLAP_ROWS = 128
"""Steps of more tokens gain nothing from dependent launch."""

LOAD_AHEAD = False
"""Whether norms load the weight behind them; not measured yet."""

_DTYPES = {torch.bfloat16: "bf16"}
"""As the table names them; the products of other dtypes are left to cuBLAS."""


def overlaps(tokens: int) -> bool:
    """Whether the kernels of a step of so many tokens start while the one before still runs."""
    return tokens <= OVERLAP_ROWS


class _Choices:
    """What the table of this GPU says, remembered."""

    def __init__(self, device: torch.device) -> None:
        self._table: LinearTable | None = shipped_table(torch.cuda.get_device_name(device))
        self._known: dict[LinearShape, Choice | None] = {}

    def of(self, op: str, rows: int, n: int, k: int, dtype: str) -> Choice | None:
        """None: nobody measured this shape."""
        if rows > MAX_ROWS or self._table is None:
            return None
        shape = LinearShape(op, rows, n, k, dtype)
        if shape not in self._known:
            self._known[shape] = self._table.choose(shape)
        return self._known[shape]


class DenseGPU:
    """Weights in the model's dtype."""

    name = "dense-gpu"

    def __init__(self, device: torch.device) -> None:
        self._choices = _Choices(device)

    def serves(self, device: torch.device, dtype: torch.dtype) -> bool:
        return device.type == "cuda"

    def prepare(self, weight: Tensor) -> Tensor:
        return weight

    def normalise(self, delta: Tensor | None, residual: Tensor, gain: Tensor, eps: float, weight: Tensor) -> Tensor:
        return _normalise(delta, residual, gain, eps, weight)

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows, k = x.shape
        choice = self._choices.of("linear", rows, len(weight), k, _DTYPES.get(x.dtype, ""))
        if isinstance(choice, SkinnyConfig):
            return skinny_linear(x, weight, bias=bias, config=choice, pdl=True)
        if isinstance(choice, GemvConfig):
            return gemv(x, weight, bias=bias, config=choice, pdl=True)
        return F.linear(x, weight, bias)

    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows, k = x.shape
        choice = self._choices.of("gate_up", rows, len(weight) // 2, k, _DTYPES.get(x.dtype, ""))
        if isinstance(choice, SkinnyConfig):
            return skinny_linear(x, weight, bias=bias, gated=True, config=choice, pdl=True)
        if isinstance(choice, GemvConfig):
            return gemv(x, weight, bias=bias, gated=True, config=choice, pdl=True)
        return silu_mul(F.linear(x, weight, bias), pdl=overlaps(rows))


class Fp8GPU:
    """FP8 weights. Tokens are quantised too, one scale each, but for the few for which the table says ``w8a16``."""

    name = "fp8-gpu"

    def __init__(self, device: torch.device) -> None:
        self._choices = _Choices(device)

    def serves(self, device: torch.device, dtype: torch.dtype) -> bool:
        return device.type == "cuda" and dtype == torch.bfloat16

    def prepare(self, weight: Fp8Weight) -> Fp8Weight:
        return weight

    def normalise(
        self, delta: Tensor | None, residual: Tensor, gain: Tensor, eps: float, weight: Fp8Weight
    ) -> Tensor | Quantized:
        if len(residual) == 1:  # one token: gemv, which takes it as it is
            return _normalise(delta, residual, gain, eps, weight.data)
        pdl = overlaps(len(residual))
        return add_rms_norm_fp8(delta, residual, gain, eps, ahead=_ahead(weight.data, pdl), pdl=pdl)

    def apply(self, x: Tensor | Quantized, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
        n, k = weight.data.shape
        if isinstance(x, Tensor) and len(x) == 1:
            choice = self._choices.of("linear", 1, n, k, "w8a16")
            if isinstance(choice, GemvConfig):
                return gemv(x, weight.data, weight_scale=weight.scale, bias=bias, config=choice, pdl=True)
        tokens, scale = _quantized(x)
        choice = self._choices.of("linear", len(tokens), n, k, "w8a8")
        if isinstance(choice, SkinnyConfig):
            return _skinny(tokens, scale, weight, bias, choice, gated=False)
        return fp8_linear(tokens, scale, weight.data, weight.scale, bias)

    def gated(self, x: Tensor | Quantized, weight: Fp8Weight, bias: Tensor | None) -> Tensor | Quantized:
        n, k = len(weight.data) // 2, weight.data.shape[1]
        if isinstance(x, Tensor) and len(x) == 1:
            choice = self._choices.of("gate_up", 1, n, k, "w8a16")
            if isinstance(choice, GemvConfig):
                return gemv(x, weight.data, weight_scale=weight.scale, bias=bias, gated=True, config=choice, pdl=True)
        tokens, scale = _quantized(x)
        choice = self._choices.of("gate_up", len(tokens), n, k, "w8a8")
        if isinstance(choice, SkinnyConfig):
            return _skinny(tokens, scale, weight, bias, choice, gated=True)
        both = fp8_linear(tokens, scale, weight.data, weight.scale, bias)
        return silu_mul_fp8(both, pdl=overlaps(len(tokens)))


def _ahead(weight: Tensor, pdl: bool) -> Tensor | None:
    """The weight, where the norm in front of it is to load its beginning."""
    return weight if pdl and LOAD_AHEAD else None


def _normalise(delta: Tensor | None, residual: Tensor, gain: Tensor, eps: float, weight: Tensor) -> Tensor:
    pdl = overlaps(len(residual))
    if delta is None:
        return rms_norm(residual, gain, eps, ahead=_ahead(weight, pdl), pdl=pdl)
    return add_rms_norm(delta, residual, gain, eps, ahead=_ahead(weight, pdl), pdl=pdl)


def _quantized(x: Tensor | Quantized) -> Quantized:
    return quantize_tokens(x, pdl=overlaps(len(x))) if isinstance(x, Tensor) else x


def _skinny(
    x: Tensor, scale: Tensor, weight: Fp8Weight, bias: Tensor | None, config: SkinnyConfig, *, gated: bool
) -> Tensor:
    return skinny_linear(
        x,
        weight.data,
        bias=bias,
        x_scale=scale,
        weight_scale=weight.scale,
        gated=gated,
        config=config,
        dtype=torch.bfloat16,
        pdl=True,
    )
