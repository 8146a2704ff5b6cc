"""Penalties on tokens that were seen before."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def penalise(
    logits: Tensor, in_prompt: Tensor, output_count: Tensor, presence: Tensor, frequency: Tensor, repetition: Tensor
) -> Tensor:
    """Logits after penalties, elementwise.

    Repetition looks at prompt and output and divides positive, multiplies negative logits (CTRL, arXiv:1909.05858);
    presence and frequency look at the output alone and subtract, as in OpenAI's API.

    Args:
        logits: float32, any shape; may hold -inf. All others have shapes that broadcast to it.
        in_prompt: bool.
        output_count: integers.
        presence, frequency, repetition: float32.
    """
    generated = output_count > 0
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(in_prompt | generated, scaled, logits)
    return logits - presence * generated - frequency * output_count


@dataclass(frozen=True, slots=True)
class SeenTokens:
    """S tokens that stand in penalised rows; one that stands there several times may be listed several times."""

    rows: Tensor
    """int64 ``[S]``: place of the row in the batch."""
    ids: Tensor
    """int64 ``[S]``."""
    in_prompt: Tensor
    """bool ``[S]``: whether the row's prompt holds it."""
    output_count: Tensor
    """int32 ``[S]``: how often it stands in the row's output."""


class TokenCounts:
    """What penalised rows have seen. Each of them holds a slot; memory grows with the most slots held at once.

    Attributes:
        in_prompt: bool ``[capacity, vocab]``.
        output: int32 ``[capacity, vocab]``.
    """

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self.output = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._free: list[int] = []

    def acquire(self, tokens: Sequence[int], prompt_len: int) -> int:
        """A slot that has seen ``tokens``, of which the first ``prompt_len`` are the prompt."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        vocab_size = self.output.shape[1]
        seen = torch.tensor(tokens, dtype=torch.int64, device=self.output.device)
        self.in_prompt[slot] = False
        self.in_prompt[slot, seen[:prompt_len]] = True
        self.output[slot] = seen[prompt_len:].bincount(minlength=vocab_size)
        return slot

    def release(self, slot: int) -> None:
        self._free.append(slot)

    def add(self, slots: Tensor, ids: Tensor) -> None:
        """One more output token ``ids[i]`` for each of ``slots`` (both int64 ``[Q]``, slots distinct)."""
        self.output[slots, ids] += 1

    def look_up(self, rows: Tensor, slots: Tensor, ids: Tensor) -> SeenTokens:
        """What is known of ``ids`` in the rows at ``slots`` (all int64 ``[S]``)."""
        return SeenTokens(rows, ids, self.in_prompt[slots, ids], self.output[slots, ids])

    def _grow(self) -> None:
        held = len(self.output)
        more = max(4, held)
        self.in_prompt = torch.cat([self.in_prompt, self.in_prompt.new_zeros(more, self.in_prompt.shape[1])])
        self.output = torch.cat([self.output, self.output.new_zeros(more, self.output.shape[1])])
        self._free.extend(range(held + more - 1, held - 1, -1))
