"""What attention needs to know about a step, and the interface behind which it is computed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.layers.kv_cache import KVCache


def token_positions(query_len: Tensor, context_len: Tensor) -> Tensor:
    """Positions ``[T]`` of a step's tokens: each row's last ``query_len`` of ``context_len``, both int64 ``[rows]``."""
    ends = query_len.cumsum(0)
    shift = torch.repeat_interleave(context_len - ends, query_len)
    return torch.arange(len(shift), device=shift.device) + shift


def token_slots(block_table: Tensor, block_size: int, query_len: Tensor, positions: Tensor) -> Tensor:
    """Cache slots ``[T]`` of a step's tokens, from one group's ``block_table`` ``[rows, max_blocks]``."""
    rows = torch.repeat_interleave(query_len)
    return block_table[rows, positions // block_size] * block_size + positions % block_size


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Rows of a step, as attention sees them. The runner fills it, once a step; all tensors are int64.

    A step's ``T`` tokens lie row after row. Row ``r`` has tokens ``query_start[r]`` to ``query_start[r + 1]``, which
    are the last of its ``context_len[r]`` tokens; their keys and values are written before anyone attends.
    """

    query_start: Tensor
    """``[rows + 1]``, from 0 to T. A row may have no token in this step."""
    context_len: Tensor
    """``[rows]``: tokens of the row once this step is computed, this step's included."""
    block_tables: tuple[Tensor, ...]
    """Per KV group ``[rows, max_blocks]``: entry i is the block of tokens ``i * block_size`` and on. Entries that no
    token of this step reaches (past the context, or before the window) are not used."""
    slots: tuple[Tensor, ...]
    """Per KV group ``[T]``: where each token's key and value go; a slot of block 0 for padding."""

    @classmethod
    def of(
        cls, query_len: Sequence[int], context_len: Sequence[int], block_tables: Sequence[Tensor], block_size: int
    ) -> "AttentionBatch":
        """Rows that compute ``query_len`` tokens and then hold ``context_len``; slots follow from the tables."""
        lens, contexts = torch.tensor(query_len), torch.tensor(context_len)
        positions = token_positions(lens, contexts)
        start = torch.zeros(len(query_len) + 1, dtype=torch.int64)
        torch.cumsum(lens, 0, out=start[1:])
        slots = tuple(token_slots(table, block_size, lens, positions) for table in block_tables)
        return cls(start, contexts, tuple(block_tables), slots)

    @property
    def positions(self) -> Tensor:
        """Position of each token in its row, ``[T]``."""
        return token_positions(self.query_start.diff(), self.context_len)


class AttentionBackend(Protocol):
    """One way to compute attention over the paged cache."""

    name: str

    @staticmethod
    def serves(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
        """Whether it works on this device, for this dtype of queries and cache and this head size."""

    def plan(self, batch: AttentionBatch, group: int, window: int | None, cache: KVCache) -> Any:
        """Everything about a step that all layers of a KV group share. Computed once a step."""

    def attend(self, plan: Any, query: Tensor, cache: KVCache, layer: int) -> Tensor:
        """Attention of ``query`` ``[T, heads, head_dim]`` over what the cache holds; ``[T, heads * head_dim]``.

        A row's result does not depend on the other rows, up to the order in which sums are rounded.
        """
