"""Captured pieces of steps whose rows compute several tokens: all that lies between two attentions is one launch.

Attention is launched as it is, because what it does depends on the rows. The other kernels see nothing but a number of
tokens, so their launches are captured once for each of some numbers of them. Without that, the host takes longer to
launch a step of a few hundred tokens than the GPU to compute it.
"""

from bisect import bisect_left
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from paceline.layers.attention import AttentionBatch
from paceline.models.decoder import Decoder
from paceline.runner.alias import alias
from paceline.runner.graph_pool import GraphPool

MOST = 2048
"""Steps of more tokens take the GPU longer than their launches take the host."""


def piece_sizes(most: int) -> list[int]:
    """Numbers of tokens worth pieces of their own: a matrix unit computes tiles of 64 or 128 in any case. From 128 on,
    where no linear layer gives partial sums. ``most`` is one of them: full steps are frequent, and the driver holds the
    host up where the launches of two such steps wait."""
    steps = [*range(128, 640, 64), *range(640, 1024, 128), *range(1024, MOST + 1, 256)]
    return [size for size in steps if size < most] + ([most] if most >= 128 else [])


class PieceGraphs:
    """Forward passes by captured pieces; see `Decoder.forward`.

    Attributes:
        waiting: sizes still to be captured.
    """

    def __init__(self, decoder: Decoder, sizes: list[int], pool: GraphPool) -> None:
        """Takes memory for the input of attention's successor, for the largest size."""
        self._decoder, self._pool = decoder, pool
        # The largest first: smaller ones then find its memory in the pool.
        self.waiting = sorted(sizes, reverse=True)
        self._sizes: list[int] = []
        self._pieces: dict[int, list[torch.cuda.CUDAGraph]] = {}
        self._outputs: dict[int, list[Tensor]] = {}
        self._captures: Generator[None, None, None] = self._capture_all()
        most, spec = max(sizes, default=0), decoder.spec
        self._ids = torch.zeros(most, dtype=torch.int32, device=decoder.device)
        self._attended = torch.zeros(most, spec.num_heads * spec.head_dim, dtype=decoder.dtype, device=decoder.device)

    @property
    def count(self) -> int:
        """Graphs, of captured and waiting sizes."""
        return (len(self._sizes) + len(self.waiting)) * (self._decoder.spec.num_layers + 1)

    def fit(self, tokens: int) -> int | None:
        """The smallest captured size that holds so many tokens; None where too much of it would be wasted."""
        place = bisect_left(self._sizes, tokens)
        if place == len(self._sizes):
            return None
        size = self._sizes[place]
        return size if size <= MOST or size - tokens <= size // 128 else None

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Launches the kernels of the next waiting size, so that what is not compiled yet will be."""
        if self.waiting:
            size = self.waiting[0]
            self._decoder.advance(0, self._attended[:size], self._decoder.enter(self._ids[:size])[1])

    @torch.inference_mode()
    def capture(self) -> None:
        """Captures one more piece. Nothing may be under way."""
        next(self._captures)

    def _capture_all(self) -> Generator[None, None, None]:
        while self.waiting:
            self.warm_up()
            size, residual = self.waiting[0], None
            decoder, ids, attended = self._decoder, self._ids[:size], self._attended[:size]
            pieces, outputs = [], []
            for index in range(decoder.spec.num_layers + 1):
                with self._pool.capture() as graph:
                    if residual is None:
                        x, residual = decoder.enter(ids)
                    else:
                        x, residual = decoder.advance(index - 1, attended, residual)
                pieces.append(graph)
                outputs.append(alias(x))
                del x  # the next piece may overwrite it: attention has read it by then
                if index == decoder.spec.num_layers:
                    self._pieces[size], self._outputs[size] = pieces, outputs
                    self._sizes = sorted(self._pieces)
                    self.waiting.pop(0)
                yield

    @torch.inference_mode()
    def forward(self, size: int, tokens: Tensor, batch: AttentionBatch, cache: Any) -> Tensor:
        """`Decoder.forward` by the pieces of ``size`` tokens, at least as many as there are.

        Returns:
            Hidden states ``[T, hidden]``; valid until the next pass.
        """
        count = len(tokens)
        self._ids[:count].copy_(tokens)
        plans = self._decoder.plan(batch, cache)
        pieces, outputs = self._pieces[size], self._outputs[size]
        attended = self._attended[:count]
        for index, qkv in enumerate(outputs[:-1]):
            pieces[index].replay()
            self._decoder.attend(index, plans, qkv[:count], cache, attended)
        pieces[-1].replay()
        return outputs[-1][:count]

    def clear(self) -> None:
        self._captures.close()
        self._pieces.clear()
        self._outputs.clear()
        self._sizes = []
