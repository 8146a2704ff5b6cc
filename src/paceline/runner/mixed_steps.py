"""Steps in which rows compute any number of tokens, by captured graphs where there is one."""

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.upload import pinned, upload
from paceline.layers.attention import AttentionBatch
from paceline.runner.computed import Computed
from paceline.runner.device_model import DeviceModel
from paceline.runner.device_rows import ALIGNMENT, ON_DEVICE, concatenated, places
from paceline.runner.graph_pool import GraphPool
from paceline.runner.graph_shapes import LONGER, MIXED_CONTEXT, mixed_shapes
from paceline.runner.rows import Chunks, Ints
from paceline.runner.step_graphs import Shape, StepGraphs


class MixedSteps:
    """Their graphs, and the memory that these read.

    Attributes:
        graphs: by numbers of tokens and of rows with one.
    """

    def __init__(self, model: DeviceModel, pool: GraphPool, most: int, most_tokens: int) -> None:
        """``most``, ``most_tokens``: rows and tokens of a step."""
        self._model = model
        self._max_context = min(MIXED_CONTEXT, model.max_context)
        shapes = mixed_shapes(min(most_tokens, model.max_context), most)
        self.graphs = StepGraphs(shapes, pool)
        longest = max((_places(*shape)[-1].stop for shape in shapes), default=0)
        # Behind a step's input lies what the host asks to be sampled.
        self._input = torch.zeros(longest + 3 * (most + ALIGNMENT), dtype=torch.int32, device=model.decoder.device)

    def capture(self) -> None:
        """Captures the next graph. Nothing may be under way."""
        self.clear(*self.graphs.waiting[0])
        self.graphs.capture(self.compute)

    def clear(self, tokens: int, singles: int) -> None:
        """Leaves nothing but padding in the input of the graph of this shape."""
        packed, _ = concatenated(_input(self._padded(Chunks.none(), tokens, singles), np.zeros(0, np.int64)))
        self._input[: len(packed)].copy_(pinned(packed))

    def fit(self, chunks: Chunks) -> Shape | None:
        """The shape of the graph that serves a step, if one does."""
        if len(chunks.rows) - chunks.single_rows > LONGER or chunks.max_context > self._max_context:
            return None
        return self.graphs.fit(len(chunks.positions), chunks.single_rows)

    def run(self, shape: Shape | None, chunks: Chunks, known: Ints, samples: Ints, lengths: Ints) -> Computed:
        """A step by the graph of this shape; None: launched kernel by kernel.

        Args:
            known: each token, or `ON_DEVICE`.
            samples: which of the rows sample.
            lengths: tokens that these rows have.
        """
        step = chunks if shape is None else self._padded(chunks, *shape)
        asked = (chunks.query_start[samples + 1] - 1, chunks.rows[samples], lengths)
        packed, slices = concatenated([*_input(step, known), *asked])
        if shape is None:
            ints = upload(packed, self._model.decoder.device)
        else:
            ints = self._input[: len(packed)].copy_(pinned(packed), non_blocking=True)
        *inputs, at, rows, positions = (ints[place] for place in slices)
        if shape is None:
            hidden = self._compute(inputs, chunks.single_rows, chunks.max_query_len, chunks.max_context)
        else:
            (hidden,) = self.graphs.replay(shape)
        logits = self._model.decoder.logits(hidden.index_select(0, at)) if len(samples) else hidden[:0]
        return Computed(hidden, logits, rows, positions)

    def compute(self, tokens: int, singles: int) -> tuple[Tensor]:
        """What the graph of this shape does: from the input to hidden states."""
        inputs = [self._input[place] for place in _places(tokens, singles)]
        return (self._compute(inputs, singles, tokens, self._max_context),)

    def _compute(self, inputs: list[Tensor], single_rows: int, max_query_len: int, max_context: int) -> Tensor:
        """From `_input` on the device to hidden states."""
        model = self._model
        rows, context_len, query_start, positions, token_rows, known = inputs
        last = model.last_token.index_select(0, rows.index_select(0, token_rows))
        width = -(-max_context // model.block_size)
        batch = AttentionBatch(
            query_start=query_start,
            context_len=context_len,
            positions=positions,
            token_rows=token_rows,
            block_tables=tuple(table[:, :width].index_select(0, rows) for table in model.rows.tables),
            single_rows=single_rows,
            max_query_len=max_query_len,
            max_context=max_context,
        )
        return model.decoder.forward(torch.where(known == ON_DEVICE, last, known), batch, model.cache)

    def _padded(self, chunks: Chunks, tokens: int, singles: int) -> Chunks:
        return chunks.padded(tokens, singles, LONGER, self._model.rows.sink_row)


def _input(chunks: Chunks, known: Ints) -> list[Ints]:
    """What the device must be told of a step; ``known``: of its first tokens."""
    ids = np.zeros(len(chunks.positions), np.int64)
    ids[: len(known)] = known
    return [chunks.rows, chunks.context_len, chunks.query_start, chunks.positions, chunks.token_index, ids]


def _places(tokens: int, singles: int) -> list[slice]:
    """Where `_input` of a captured step lies."""
    rows = singles + LONGER + 1
    return places([rows, rows, rows + 1, tokens, tokens, tokens])
