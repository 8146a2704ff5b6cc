"""Keys and values of all layers, in blocks of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """What a block costs and which group each layer belongs to; known before any memory is taken."""

    layer_groups: tuple[int, ...]
    """KV group of each layer."""
    num_kv_heads: int
    head_dim: int
    block_size: int
    """Tokens in a block."""
    dtype: torch.dtype

    @property
    def num_groups(self) -> int:
        return max(self.layer_groups) + 1

    def bytes_per_block(self, group: int) -> int:
        """Bytes that one block of this group takes, over all of the group's layers, keys and values together."""
        token = 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return self.layer_groups.count(group) * self.block_size * token


class KVCache:
    """Per-layer tensors in which slot ``block * block_size + offset`` holds one token.

    Block 0 is the sink: no sequence owns it, padding writes there. All memory starts as zeros, so that whatever is
    read is finite.

    Attributes:
        layout: the layout it was made for.
        num_blocks: blocks of each group, the sink included.
        keys, values: one ``[num_blocks * block_size, num_kv_heads, head_dim]`` tensor a layer.
    """

    def __init__(self, layout: KVLayout, num_blocks: Sequence[int], device: torch.device | str = "cpu") -> None:
        if len(num_blocks) != layout.num_groups:
            raise ValueError(f"{len(num_blocks)} block counts for {layout.num_groups} KV groups")
        self.layout = layout
        self.num_blocks = tuple(num_blocks)
        shapes = [
            (num_blocks[group] * layout.block_size, layout.num_kv_heads, layout.head_dim)
            for group in layout.layer_groups
        ]
        self.keys = [torch.zeros(shape, dtype=layout.dtype, device=device) for shape in shapes]
        self.values = [torch.zeros(shape, dtype=layout.dtype, device=device) for shape in shapes]

    @property
    def block_size(self) -> int:
        return self.layout.block_size

    def bytes_per_block(self, group: int) -> int:
        """Bytes that one block of this group takes, over all of the group's layers, keys and values together."""
        return self.layout.bytes_per_block(group)

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Stores ``key`` and ``value`` ``[T, num_kv_heads, head_dim]`` at ``slots`` ``[T]`` int64.

        Slots may repeat only inside the sink; which of the repeated tokens stays there is not defined.
        """
        self.keys[layer].index_copy_(0, slots, key)
        self.values[layer].index_copy_(0, slots, value)
