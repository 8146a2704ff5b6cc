"""Fills a decoder from a checkpoint: every parameter exactly once, every tensor accounted for."""

import logging
import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from paceline.checkpoint.checkpoint import Checkpoint
from paceline.checkpoint.error import CheckpointError
from paceline.models.decoder import Decoder
from paceline.models.registry import decoder_spec
from paceline.models.weights import EMBEDDING, HEAD, Parameter, is_buffer, parameter_table

log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
"""Told what is being done and the share of it that is done."""


def load_decoder(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    load_format: Literal["auto", "dummy"] = "auto",
    progress: Progress | None = None,
) -> Decoder:
    """Builds the checkpoint's decoder and fills it.

    Args:
        load_format: ``dummy``: random weights from the config alone.

    Raises:
        CheckpointError: config not supported, or tensors missing, left over or of a wrong shape; names them.
    """
    spec = decoder_spec(checkpoint.config)
    table = parameter_table(spec)
    device = torch.device(device)
    read: Callable[[Parameter], Tensor]
    if load_format == "dummy":
        read = _DummyWeights(dtype, device)
    else:
        _check_names(checkpoint, table, tied=spec.tied)
        read = _CheckpointWeights(checkpoint, dtype, device)
    waiting = {parameter.name: parameter for parameter in table}
    total = sum(math.prod(parameter.shape) for parameter in table)
    done = 0

    def take(name: str) -> Tensor:
        nonlocal done
        parameter = waiting.pop(name)
        tensor = read(parameter)
        done += tensor.numel()
        if progress is not None:
            progress("loading weights", done / total)
        return tensor

    decoder = Decoder(spec, take, dtype=dtype, device=device)
    assert not waiting, f"parameters that no layer took: {', '.join(waiting)}"
    return decoder


def _check_names(checkpoint: Checkpoint, table: list[Parameter], *, tied: bool) -> None:
    """Raises unless the checkpoint has exactly the tensors that the table names."""
    needed = {name for parameter in table for name, _ in parameter.sources}
    present = {name for name in checkpoint.tensor_names() if not is_buffer(name)}
    if tied and HEAD in present:
        log.info("%s ties its head to the embedding: its %s is a duplicate and is left unread", checkpoint.name, HEAD)
        present.remove(HEAD)
    if missing := sorted(needed - present):
        hint = ""
        if missing == [HEAD]:
            hint = f"; set tie_word_embeddings to true in config.json if the head is {EMBEDDING}"
        raise CheckpointError(f"{checkpoint.name} lacks {_listed(missing)}{hint}")
    if unexpected := sorted(present - needed):
        architecture = checkpoint.config.get("architectures")
        raise CheckpointError(f"{checkpoint.name} has tensors that {architecture} does not use: {_listed(unexpected)}")


def _listed(names: list[str], most: int = 10) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


class _CheckpointWeights:
    """Reads parameters from a checkpoint, fused ones part by part."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint, self._dtype, self._device = checkpoint, dtype, device

    def __call__(self, parameter: Parameter) -> Tensor:
        parts = []
        for name, shape in parameter.sources:
            part = self._checkpoint.tensor(name)
            if tuple(part.shape) != shape:
                raise CheckpointError(
                    f"{name} in {self._checkpoint.name} has shape {list(part.shape)}, config.json says {list(shape)}"
                )
            if not part.is_floating_point():
                raise CheckpointError(f"{name} in {self._checkpoint.name} holds {part.dtype}, which is not supported")
            parts.append(part.to(self._device, self._dtype))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class _DummyWeights:
    """Random parameters: norms near 1, biases near 0, matrices that keep the scale of what passes through.

    One block of random numbers is repeated, each time from another place; its length is prime, so that no two rows of
    a matrix are alike.
    """

    BLOCK = 4_194_301

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        self._block = torch.randn(self.BLOCK, generator=generator).to(device, dtype)
        self._next = 0

    def __call__(self, parameter: Parameter) -> Tensor:
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
        return flat.mul_(0.1 if len(shape) == 1 else shape[1] ** -0.5).view(shape)
