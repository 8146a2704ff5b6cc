"""The KV blocks of one group: who holds them, which may be reused, and which hold a known prefix."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from paceline.engine.step import SINK_BLOCK

ROOT_KEY = b""
"""Parent of a prompt's first block."""


def prefix_key(parent: bytes, tokens: Sequence[int], extras: bytes) -> bytes:
    """Key of a full block: it stands for these tokens after everything that ``parent`` stands for.

    BLAKE2b with 256 bits: two prefixes that differ share a key only if someone breaks the hash.

    Args:
        parent: key of the block before, or ``ROOT_KEY``.
        tokens: ids in the block.
        extras: from `key_extras`; what else the keys and values depend on.
    """
    digest = hashlib.blake2b(parent, digest_size=32)
    digest.update(len(extras).to_bytes(4, "little") + extras)
    digest.update(array("q", tokens).tobytes())
    return digest.digest()


def key_extras(**parts: str) -> bytes:
    """Encodes what a prefix depends on besides its tokens. The kind is part of it, so that an adapter named
    like somebody's salt is not mistaken for that salt; empty parts do not count."""
    fields = ((kind.encode(), value.encode()) for kind, value in sorted(parts.items()) if value)
    return b"".join(
        len(kind).to_bytes(2, "little") + kind + len(value).to_bytes(4, "little") + value for kind, value in fields
    )


class BlockPool:
    """Reference counts, a free list in least-recently-used order, and the prefix index. All operations are O(1).

    A block is *held* (one or more references), or *free*. A free block may still be in the index: it is found
    and revived until its turn in the free list comes.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"{num_blocks} KV blocks: one is the sink, so at least 2 are needed")
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(
            block for block in range(num_blocks) if block != SINK_BLOCK
        )

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def capacity(self) -> int:
        """Blocks that sequences can hold."""
        return self.num_blocks - 1

    def references(self, block: int) -> int:
        return self._references[block]

    def allocate(self, count: int) -> list[int]:
        """Takes the ``count`` least recently used free blocks out of the index. The caller checked ``num_free``."""
        assert 0 <= count <= len(self._free), "allocation beyond the free blocks"
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
            key = self._keys[block]
            if key is not None:
                self._keys[block] = None
                del self._index[key]
        return blocks

    def share(self, block: int) -> None:
        """Takes one more reference to a block found in the index."""
        if self._references[block] == 0:
            del self._free[block]
        self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Gives up one reference to each block of a table. The end of a prefix is reused before its beginning."""
        for block in reversed(blocks):
            if block == SINK_BLOCK:
                continue
            assert self._references[block] > 0, f"block {block} released twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if self._keys[block] is None:
                    self._free.move_to_end(block, last=False)

    def find(self, key: bytes) -> int | None:
        """The block that holds this prefix, held or free."""
        return self._index.get(key)

    def publish(self, block: int, key: bytes) -> None:
        """Enters a full block into the index. The first block of a key stays; a twin is not indexed."""
        assert self._references[block] > 0, "only a held block can be published"
        if key not in self._index and self._keys[block] is None:
            self._index[key] = block
            self._keys[block] = key

    def check_idle(self) -> None:
        """Asserts that no one holds a block."""
        assert self.num_free == self.capacity, f"{self.capacity - self.num_free} KV blocks were never released"
        assert not any(self._references), "a free block has references"
        assert all(self._keys[block] == key for key, block in self._index.items()), "the prefix index is damaged"
