"""Runs a decoder over prompts in steps, as a runner would."""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.layers.attention import AttentionBatch
from paceline.models.decoder import Decoder


class Steps:
    """Rows with random block tables over one cache; `step` computes the next tokens of each row."""

    def __init__(self, decoder: Decoder, lengths: Sequence[int], block_size: int = 4, seed: int = 0) -> None:
        blocks = [-(-length // block_size) for length in lengths]
        generator = torch.Generator().manual_seed(seed)
        self.tables = []
        for _ in decoder.spec.kv_windows:
            table = torch.zeros(len(lengths), max(blocks), dtype=torch.int64)
            order = torch.randperm(sum(blocks), generator=generator) + 1
            for row, ids in enumerate(order.split(blocks)):
                table[row, : len(ids)] = ids
            self.tables.append(table)
        self.decoder, self.block_size = decoder, block_size
        self.cache = decoder.make_cache(decoder.kv_layout(block_size), [sum(blocks) + 1] * len(self.tables))
        self.done = [0] * len(lengths)

    def step(self, tokens: Sequence[Tensor]) -> list[Tensor]:
        """Logits of each row's new ``tokens``, ``[n, vocab]`` each."""
        counts = [len(row) for row in tokens]
        self.done = [done + n for done, n in zip(self.done, counts, strict=True)]
        batch = AttentionBatch.of(counts, self.done, self.tables)
        hidden = self.decoder.forward(torch.cat(list(tokens)), batch, self.cache)
        return list(self.decoder.logits(hidden).split(counts))


def whole(decoder: Decoder, ids: Tensor) -> Tensor:
    """Logits of a prompt in one step, ``[T, vocab]``."""
    return Steps(decoder, [len(ids)]).step([ids])[0]


def chunked(decoder: Decoder, ids: Tensor, size: int) -> Tensor:
    """Logits of a prompt in chunks of ``size`` tokens, ``[T, vocab]``."""
    steps = Steps(decoder, [len(ids)])
    return torch.cat([steps.step([chunk])[0] for chunk in ids.split(size)])
