"""What attention needs to know about a model and about a step, and the interface behind which it is computed."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.layers.kv_cache import KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """What all attention layers of a model have in common."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    inverse_frequencies: Tensor
    """float32 ``[head_dim / 2]``, radians per position, on the model's device."""
    rope_scale: float
    """Multiplies cosine and sine."""
    max_position: int
    norm_eps: float


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights ``[head_dim]`` of an RMSNorm over each head of queries and keys, before the rotary embedding."""

    query: Tensor
    key: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """Rows of a step, as attention sees them. The runner fills it, once a step; tensors are int64 on a CPU, int32 on
    a GPU.

    A step's ``T`` tokens lie row after row. Row ``r`` has tokens ``query_start[r]`` to ``query_start[r + 1]``, which
    are the last of its ``context_len[r]`` tokens; their keys and values are written before anyone attends.
    """

    query_start: Tensor
    """``[rows + 1]``, from 0 to T. A row may have no token in this step."""
    context_len: Tensor
    """``[rows]``: tokens of the row once this step is computed, this step's included."""
    positions: Tensor
    """``[T]``: of each token in its row."""
    token_rows: Tensor
    """``[T]``: index of each token's row."""
    block_tables: tuple[Tensor, ...]
    """Per KV group ``[rows, max_blocks]``: entry i is the block of tokens ``i * block_size`` and on. Entries that no
    token of this step reaches (past the context, or before the window) are not used."""
    single_rows: int
    """So many rows, the first ones, have one token each, or the last of them a context of 0 and none; a row after them
    may have any number."""
    max_query_len: int
    """Most tokens of a row."""
    max_context: int
    """At least the longest context."""

    @classmethod
    def of(
        cls, query_len: Sequence[int], context_len: Sequence[int], block_tables: Sequence[Tensor]
    ) -> "AttentionBatch":
        """Rows that compute ``query_len`` tokens and then hold ``context_len``."""
        device = block_tables[0].device
        dtype = block_tables[0].dtype
        positions = [p for n, context in zip(query_len, context_len, strict=True) for p in range(context - n, context)]
        starts = [0]
        for n in query_len:
            starts.append(starts[-1] + n)
        rows = [row for row, n in enumerate(query_len) for _ in range(n)]

        def ints(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            query_start=ints(starts),
            context_len=ints(context_len),
            positions=ints(positions),
            token_rows=ints(rows),
            block_tables=tuple(block_tables),
            single_rows=sum(1 for _ in takewhile(lambda n: n == 1, query_len)),
            max_query_len=max(query_len, default=0),
            max_context=max(context_len, default=0),
        )

    def slots(self, group: int, block_size: int) -> Tensor:
        """Where each token's key and value go, ``[T]``: ``block * block_size + offset``."""
        blocks = self.block_tables[group][self.token_rows, self.positions // block_size]
        return blocks * block_size + self.positions % block_size


class AttentionBackend(Protocol):
    """One way to compute attention over a paged cache, whose memory it lays out itself."""

    name: str

    def __init__(self, spec: AttentionSpec, dtype: torch.dtype) -> None: ...

    @staticmethod
    def serves(device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int) -> bool:
        """Whether it works on this device, for this dtype of queries and of the cache, and this head size."""

    def make_cache(self, layout: KVLayout, num_blocks: Sequence[int], device: torch.device) -> Any:
        """A cache with so many blocks for each KV group, the sink included."""

    def plan(self, batch: AttentionBatch, group: int, window: int | None, cache: Any) -> Any:
        """Everything about a step that all layers of a KV group share. Computed once a step."""

    def attend(self, plan: Any, qkv: Tensor, norms: HeadNorms | None, cache: Any, layer: int) -> Tensor:
        """What lies between the QKV projection and the output projection: head norms, rotary embedding, writing keys
        and values to the cache, and attention over what it then holds.

        A row's result does not depend on the other rows, up to the order in which sums are rounded.

        Args:
            qkv: ``[T, (heads + 2 * kv_heads) * head_dim]``; may be overwritten. A backend whose linear layers give
                partial sums ``[splits, T, ...]`` takes those too.

        Returns:
            ``[T, heads * head_dim]``.
        """
