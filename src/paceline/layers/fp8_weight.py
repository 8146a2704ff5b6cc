"""A weight in FP8."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.fp8 import quantize_rows


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """Stands for ``data * scale[:, None]``."""

    data: Tensor
    """float8_e4m3fn ``[out, in]``."""
    scale: Tensor
    """float32 ``[out]``."""

    @classmethod
    def of(cls, weight: Tensor) -> "Fp8Weight":
        """Quantises ``[out, in]``, one scale a row."""
        if weight.is_cuda:
            from paceline.kernels.triton.fp8 import quantize_tokens

            return cls(*quantize_tokens(weight))
        return cls(*quantize_rows(weight))

    @classmethod
    def joined(cls, parts: Sequence["Fp8Weight"]) -> "Fp8Weight":
        """The weights below each other, ``[out of all, in]``."""
        if len(parts) == 1:
            return parts[0]
        return cls(torch.cat([part.data for part in parts]), torch.cat([part.scale for part in parts]))

    def times(self, factors: Tensor) -> "Fp8Weight":
        """Row by row, ``[out]``."""
        return Fp8Weight(self.data, self.scale * factors)

    def wide(self, dtype: torch.dtype) -> Tensor:
        """What it stands for, ``[out, in]``."""
        return (self.data.float() * self.scale[:, None]).to(dtype)
