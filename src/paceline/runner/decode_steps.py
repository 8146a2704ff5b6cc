"""Steps in which every row computes one token, as captured graphs: from the rows to the scores of their next tokens."""

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.triton.gather_rows import gather_rows
from paceline.kernels.upload import pinned, upload
from paceline.layers.attention import AttentionBatch
from paceline.layers.gpu_linear import overlaps
from paceline.runner.computed import Computed
from paceline.runner.device_model import DeviceModel
from paceline.runner.device_rows import ON_DEVICE
from paceline.runner.graph_pool import GraphPool
from paceline.runner.graph_shapes import decode_shapes
from paceline.runner.rows import Chunks, Ints
from paceline.runner.step_graphs import StepGraphs


class DecodeSteps:
    """Their graphs, and the memory that these read and write.

    Attributes:
        graphs: by number of rows.
        input: int32: rows, context lengths and known tokens of a step, one after the other.
    """

    def __init__(self, model: DeviceModel, pool: GraphPool, most: int) -> None:
        """``most``: rows of a step."""
        self._model = model
        self.graphs = StepGraphs(decode_shapes(most), pool)
        device = model.decoder.device
        self.input = torch.zeros(3 * most, dtype=torch.int32, device=device)
        self._tokens, self._positions, self._lengths = (
            torch.zeros(most, dtype=torch.int32, device=device) for _ in range(3)
        )
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._tables = [
            torch.zeros(most, table.shape[1], dtype=torch.int32, device=device) for table in model.rows.tables
        ]
        self._expected = np.zeros(0, np.int32)  # what `input` holds, as far as the host knows

    def capture(self) -> None:
        """Captures the next graph. Nothing may be under way."""
        (size,) = self.graphs.waiting[0]
        self._expected = np.zeros(0, np.int32)
        self.input.zero_()
        self.input[:size] = self._model.rows.sink_row
        self.input[size : 2 * size] = 1
        self.graphs.capture(self.compute)

    def fit(self, chunks: Chunks) -> int | None:
        """Rows of the graph that serves a step, if one does."""
        shape = self.graphs.fit(len(chunks.rows)) if chunks.max_query_len == 1 else None
        return None if shape is None else shape[0]

    def replay(self, size: int, chunks: Chunks, known: Ints, samples: Ints) -> Computed:
        """A step by the graph of ``size`` rows.

        Args:
            known: the token of each row, or `ON_DEVICE`.
            samples: which of the rows sample.
        """
        n = len(chunks.rows)
        packed = np.zeros(3 * size, np.int32)
        packed[:n] = chunks.rows
        packed[n:size] = self._model.rows.sink_row
        packed[size : size + n] = chunks.context_len
        packed[size + n : 2 * size] = 1
        packed[2 * size : 2 * size + n] = known
        if not np.array_equal(packed, self._expected):
            self.input[: 3 * size].copy_(pinned(packed), non_blocking=True)
        hidden, logits = self.graphs.replay((size,))
        self._expected = packed
        packed[size : 2 * size] += packed[2 * size :] == ON_DEVICE
        hidden, rows, positions = hidden[:n], self.input[:n], self._lengths[:n]
        if len(samples) == n:
            return Computed(hidden, logits[:n], rows, positions)
        at = upload(samples.astype(np.int32), self._model.decoder.device)
        return Computed(hidden, *(each.index_select(0, at) for each in (logits, rows, positions)))

    def compute(self, size: int, layers: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """What a graph of ``size`` rows does: from ``input`` to hidden states and scores. It leaves the input of the
        next step there, if the same rows go on. ``layers``: as `Decoder.forward` takes them."""
        model = self._model
        rows, context_len, known = self.input[: 3 * size].view(3, size)
        tables = [table[:size] for table in self._tables]
        gather_rows(
            rows,
            context_len,
            known,
            model.last_token,
            model.rows.tables,
            block_size=model.block_size,
            tokens=self._tokens,
            positions=self._positions,
            lengths=self._lengths,
            out_tables=tables,
            pdl=overlaps(size),
        )
        batch = AttentionBatch(
            query_start=self._starts[: size + 1],
            context_len=self._lengths[:size],
            positions=self._positions[:size],
            token_rows=self._starts[:size],
            block_tables=tuple(tables),
            single_rows=size,
            max_query_len=1,
            max_context=model.max_context,
        )
        hidden = model.decoder.forward(self._tokens[:size], batch, model.cache, layers=layers)
        return hidden, model.decoder.logits(hidden)
