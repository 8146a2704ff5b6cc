"""Fills a decoder from a checkpoint: every parameter exactly once, every tensor accounted for."""

import logging
import math
from collections.abc import Callable

import torch
from torch import Tensor

from paceline.checkpoint.checkpoint import Checkpoint
from paceline.checkpoint.error import CheckpointError
from paceline.checkpoint.quantization import is_fp8
from paceline.engine.config import LoadFormat, Quantization
from paceline.layers.fp8_weight import Fp8Weight
from paceline.models.decoder import Decoder
from paceline.models.kv_scales import is_kv_scale, kv_factors
from paceline.models.registry import decoder_spec
from paceline.models.spec import DecoderSpec
from paceline.models.weights import (
    EMBEDDING,
    HEAD,
    Parameter,
    input_scale_names,
    is_buffer,
    parameter_table,
    weight_scale_names,
)

log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
"""Told what is being done and the share of it that is done."""

Weight = Tensor | Fp8Weight

_WIDE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def load_decoder(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    kv_dtype: torch.dtype | None = None,
    load_format: LoadFormat = "auto",
    quantization: Quantization = "auto",
    progress: Progress | None = None,
) -> Decoder:
    """Builds the checkpoint's decoder and fills it.

    Args:
        kv_dtype: of keys and values; None: ``dtype``.
        load_format: ``dummy``: random weights from the config alone.
        quantization: ``fp8``: the weights of all linear layers but the head become FP8, each when it is read, with one
            scale an output channel. ``auto``: those that the checkpoint holds in FP8 are, with its scales.

    Raises:
        CheckpointError: config not supported, or tensors missing, left over or of a wrong shape or dtype; names them.
    """
    spec = decoder_spec(checkpoint.config)
    fp8 = is_fp8(checkpoint.config)
    table = parameter_table(spec)
    device = torch.device(device)
    read: Callable[[Parameter], Weight]
    factors: dict[str, Tensor] = {}
    if load_format == "dummy":
        read = _DummyWeights(dtype, device, fp8=fp8 or quantization == "fp8")
    else:
        scales, kv_scales = _check_names(checkpoint, table, spec, fp8=fp8)
        read = stored = _CheckpointWeights(checkpoint, scales, dtype, device, fp8=quantization == "fp8")
        if kv_dtype == torch.float8_e4m3fn:
            factors = kv_factors(spec, {name: stored.number(name) for name in kv_scales})
            if not factors:
                log.warning("%s has no scales for an FP8 KV cache, which works with scale 1", checkpoint.name)
    waiting = {parameter.name: parameter for parameter in table}
    total = sum(math.prod(parameter.shape) for parameter in table)
    done = 0

    def take(name: str) -> Weight:
        nonlocal done
        parameter = waiting.pop(name)
        weight = read(parameter)
        if name in factors:
            weight = _times(weight, factors[name].to(device))
        done += math.prod(parameter.shape)
        if progress is not None:
            progress("loading weights", done / total)
        return weight

    decoder = Decoder(spec, take, dtype=dtype, device=device, kv_dtype=kv_dtype)
    assert not waiting, f"parameters that no layer took: {', '.join(waiting)}"
    return decoder


def _check_names(
    checkpoint: Checkpoint, table: list[Parameter], spec: DecoderSpec, *, fp8: bool
) -> tuple[dict[str, str], list[str]]:
    """Raises unless the checkpoint has exactly the tensors that the table names, and in FP8 their scales.

    Returns:
        The name of the scale of each weight that has one, and the names of scales of the KV cache.
    """
    needed = {name for parameter in table for name, _ in parameter.sources}
    present = {name for name in checkpoint.tensor_names() if not is_buffer(name)}
    scales: dict[str, str] = {}
    kv_scales: list[str] = []
    if fp8:
        matrices = [name for parameter in table for name, shape in parameter.sources if len(shape) == 2]
        scales = {name: scale for name in matrices for scale in weight_scale_names(name) if scale in present}
        kv_scales = sorted(name for name in present if is_kv_scale(name, spec))
        present.difference_update(scales.values(), kv_scales, *map(input_scale_names, matrices))
    if spec.tied and HEAD in present:
        log.info("%s ties its head to the embedding: its %s is a duplicate and is left unread", checkpoint.name, HEAD)
        present -= {HEAD, *weight_scale_names(HEAD), *input_scale_names(HEAD)}
    if missing := sorted(needed - present):
        hint = ""
        if missing == [HEAD]:
            hint = f"; set tie_word_embeddings to true in config.json if the head is {EMBEDDING}"
        raise CheckpointError(f"{checkpoint.name} lacks {_listed(missing)}{hint}")
    if unexpected := sorted(present - needed):
        architecture = checkpoint.config.get("architectures")
        raise CheckpointError(f"{checkpoint.name} has tensors that {architecture} does not use: {_listed(unexpected)}")
    return scales, kv_scales


def _listed(names: list[str], most: int = 10) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _times(weight: Weight, factors: Tensor) -> Weight:
    """Row by row, ``[out]``."""
    if isinstance(weight, Fp8Weight):
        return weight.times(factors)
    return weight * factors.to(weight.dtype).view(-1, *[1] * (weight.dim() - 1))


class _CheckpointWeights:
    """Reads parameters from a checkpoint, fused ones part by part.

    What goes to a GPU goes as it is stored and is converted there.
    """

    def __init__(
        self, checkpoint: Checkpoint, scales: dict[str, str], dtype: torch.dtype, device: torch.device, *, fp8: bool
    ) -> None:
        """
        Args:
            scales: name of the scale of each weight that is stored in FP8.
            fp8: quantise what may be FP8.
        """
        self._checkpoint, self._scales, self._dtype, self._device, self._fp8 = checkpoint, scales, dtype, device, fp8

    def __call__(self, parameter: Parameter) -> Weight:
        parts = [self._part(name, shape, parameter.may_be_fp8) for name, shape in parameter.sources]
        narrow = [part for part in parts if isinstance(part, Fp8Weight)]
        if len(narrow) == len(parts):
            return Fp8Weight.joined(narrow)
        # Parts that the checkpoint left wide make all of a fused weight wide.
        wide = [part.wide(self._dtype) if isinstance(part, Fp8Weight) else part for part in parts]
        return wide[0] if len(wide) == 1 else torch.cat(wide)

    def _part(self, name: str, shape: tuple[int, ...], may_be_fp8: bool) -> Weight:
        stored = self._checkpoint.tensor(name)
        if tuple(stored.shape) != shape:
            raise CheckpointError(
                f"{name} in {self._checkpoint.name} has shape {list(stored.shape)}, config.json says {list(shape)}"
            )
        if name in self._scales:
            if stored.dtype != torch.float8_e4m3fn:
                raise self._error(name, f"holds {stored.dtype} but has a scale: only float8_e4m3fn is supported")
            weight = Fp8Weight(stored.to(self._device), self._scale(self._scales[name], shape))
            return weight if may_be_fp8 else weight.wide(self._dtype)
        if stored.dtype == torch.float8_e4m3fn:
            raise self._error(name, f"holds FP8 without its scale {weight_scale_names(name)[0]}")
        if stored.dtype not in _WIDE:
            raise self._error(name, f"holds {stored.dtype}, which is not supported")
        wide = stored.to(self._device).to(self._dtype)
        return Fp8Weight.of(wide) if may_be_fp8 and self._fp8 else wide

    def number(self, name: str) -> float:
        """The largest of a KV cache's scales: one, or one for each head."""
        largest = float(self._numbers(name).max())
        if largest == 0:
            raise self._error(name, "holds no scale but 0")
        return largest

    def _scale(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Float32 ``[out]``, from one number or one for each output channel of a weight of this shape."""
        scale, rows = self._numbers(name), shape[0]
        if scale.numel() != 1 and tuple(scale.shape) not in ((rows,), (rows, 1)):
            raise self._error(
                name,
                f"has shape {list(scale.shape)} for a weight {list(shape)}: one scale for all or one an output "
                "channel is supported, blocks are not",
            )
        return scale.flatten().expand(rows).contiguous().to(self._device)

    def _numbers(self, name: str) -> Tensor:
        """Scales in float32, on the CPU."""
        stored = self._checkpoint.tensor(name)
        if stored.dtype not in _WIDE or stored.numel() == 0:
            raise self._error(name, f"holds {list(stored.shape)} of {stored.dtype}, which is not supported for a scale")
        scale = stored.to(torch.float32)
        if not (scale.isfinite() & (scale >= 0)).all():
            raise self._error(name, "holds scales that are negative or not finite")
        return scale

    def _error(self, name: str, what: str) -> CheckpointError:
        return CheckpointError(f"{name} in {self._checkpoint.name} {what}")


class _DummyWeights:
    """Random parameters: norms near 1, biases near 0, matrices that keep the scale of what passes through.

    One block of random numbers is repeated, each time from another place; its length is prime, so that no two rows of
    a matrix are alike.
    """

    BLOCK = 4_194_301

    def __init__(self, dtype: torch.dtype, device: torch.device, *, fp8: bool) -> None:
        """
        Args:
            fp8: quantise what may be FP8.
        """
        generator = torch.Generator().manual_seed(0)
        self._block = torch.randn(self.BLOCK, generator=generator).to(device, dtype)
        self._next = 0
        self._fp8 = fp8

    def __call__(self, parameter: Parameter) -> Weight:
        shape = parameter.shape
        flat = self._block.new_empty(math.prod(shape))
        start = 0
        while start < len(flat):
            part = self._block[self._next :][: len(flat) - start]
            flat[start : start + len(part)] = part
            start += len(part)
            self._next = (self._next + len(part)) % self.BLOCK
        if parameter.name.endswith("norm"):
            return flat.mul_(0.1).add_(1.0)
        weight = flat.mul_(0.1 if len(shape) == 1 else shape[1] ** -0.5).view(shape)
        return Fp8Weight.of(weight) if parameter.may_be_fp8 and self._fp8 else weight
