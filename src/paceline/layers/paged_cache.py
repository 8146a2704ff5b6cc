"""Keys and values of all layers on a GPU, as the Triton kernels read them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.layers.kv_cache import KVLayout


class PagedKVCache:
    """One tensor a layer, in which a block holds the keys, then the values of its tokens, head by head.

    Block 0 is the sink: no sequence owns it, padding writes there. All memory starts as zeros, so that whatever is
    read is finite.

    Attributes:
        layout: the layout it was made for.
        keys, values: one ``[num_blocks, num_kv_heads, block_size, head_dim]`` view a layer.
    """

    def __init__(self, layout: KVLayout, num_blocks: Sequence[int], device: torch.device) -> None:
        if len(num_blocks) != layout.num_groups:
            raise ValueError(f"{len(num_blocks)} block counts for {layout.num_groups} KV groups")
        self.layout = layout
        shape = (2, layout.num_kv_heads, layout.block_size, layout.head_dim)
        data = [
            torch.zeros(num_blocks[group], *shape, dtype=layout.dtype, device=device) for group in layout.layer_groups
        ]
        self.keys: list[Tensor] = [layer[:, 0] for layer in data]
        self.values: list[Tensor] = [layer[:, 1] for layer in data]
