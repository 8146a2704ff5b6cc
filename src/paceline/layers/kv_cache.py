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
    """One tensor a layer, in which slot ``block * block_size + offset`` holds the keys and values of one token.

    Block 0 is the sink: no sequence owns it, padding writes there. All memory starts as zeros, so that whatever is
    read is finite.

        data[layer]   [slot 0:  K head 0 | K head 1 | ... | V head 0 | V head 1 | ...]
                      [slot 1:  ...

    Keys and values lie together because a step's tokens come with both (one write) and attention reads both.

    Attributes:
        layout: the layout it was made for.
        num_blocks: blocks of each group, the sink included.
        data: one ``[num_blocks * block_size, 2 * num_kv_heads, head_dim]`` tensor a layer.
    """

    def __init__(self, layout: KVLayout, num_blocks: Sequence[int], device: torch.device | str = "cpu") -> None:
        if len(num_blocks) != layout.num_groups:
            raise ValueError(f"{len(num_blocks)} block counts for {layout.num_groups} KV groups")
        self.layout = layout
        self.num_blocks = tuple(num_blocks)
        self.data = [
            torch.zeros(
                num_blocks[group] * layout.block_size,
                2 * layout.num_kv_heads,
                layout.head_dim,
                dtype=layout.dtype,
                device=device,
            )
            for group in layout.layer_groups
        ]

    @property
    def block_size(self) -> int:
        return self.layout.block_size

    def keys(self, layer: int) -> Tensor:
        """View ``[slots, num_kv_heads, head_dim]``."""
        return self.data[layer][:, : self.layout.num_kv_heads]

    def values(self, layer: int) -> Tensor:
        """View ``[slots, num_kv_heads, head_dim]``."""
        return self.data[layer][:, self.layout.num_kv_heads :]

    def bytes_per_block(self, group: int) -> int:
        """Bytes that one block of this group takes, over all of the group's layers, keys and values together."""
        return self.layout.bytes_per_block(group)

    def write(self, layer: int, slots: Tensor, key_value: Tensor) -> None:
        """Stores ``key_value`` ``[T, 2 * num_kv_heads, head_dim]``, keys first, at ``slots`` ``[T]`` int64.

        Slots may repeat only inside the sink; which of the repeated tokens stays there is not defined.
        """
        self.data[layer].index_copy_(0, slots, key_value)
