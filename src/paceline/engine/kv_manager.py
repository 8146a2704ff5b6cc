"""Block tables of sequences over all KV groups: prefix hits, growth, windows, release."""

from collections import Counter
from collections.abc import Sequence as Seq

from paceline.engine.block_pool import ROOT_KEY, BlockPool, key_extras, prefix_key
from paceline.engine.sequence import Sequence
from paceline.engine.step import SINK_BLOCK, KVGroup


class KVManager:
    """Gives sequences blocks. Every group has a pool and a table of its own; position p of a sequence is in entry
    ``p // block_size`` of each table. Entries that fell out of a group's window point to the sink."""

    def __init__(self, groups: Seq[KVGroup], block_size: int, prefix_cache: bool) -> None:
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.windows = [group.window for group in groups]
        self.pools = [BlockPool(group.num_blocks) for group in groups]

    @property
    def used(self) -> float:
        """Share of the fullest pool that sequences hold."""
        return max(1 - pool.num_free / pool.capacity for pool in self.pools)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def fits_empty(self, tokens: int) -> bool:
        """Whether a sequence of so many tokens fits when nothing else does."""
        return all(self.blocks_for(tokens) <= pool.capacity for pool in self.pools)

    # Admission

    def find_prefix(self, sequence: Sequence) -> int:
        """Leading blocks of the sequence that all groups still hold.

        A full-attention group needs every block of the prefix. A windowed group needs those that the next token
        reaches back to. At least the last token is left to compute: its logits are wanted.
        """
        if not self._shares(sequence) or sequence.wants_prompt_logprobs:
            return 0
        most = (len(sequence.tokens) - 1) // self.block_size
        keys = self._keys(sequence, most)
        for pool, window in zip(self.pools, self.windows, strict=True):
            if window is None:
                most = next((i for i in range(most) if pool.find(keys[i]) is None), most)
        while most and not all(self._window_held(g, keys, most) for g in range(len(self.pools))):
            most -= 1
        return most

    def can_admit(self, sequence: Sequence, hit: int, headroom: int, without: Seq[Sequence] = ()) -> bool:
        """Whether the whole sequence fits beside the others and leaves ``headroom`` blocks for them to grow.

        With ``without``: whether it would fit if these sequences gave their blocks back.
        """
        total = self.blocks_for(sequence.length)
        for group, pool in enumerate(self.pools):
            first = self._first_block(group, hit * self.block_size)
            held = sum(pool.references(self._find(pool, sequence.keys[i])) > 0 for i in range(first, hit))
            references = Counter(block for other in without for block in other.tables[group])
            freed = sum(pool.references(block) == count for block, count in references.items())
            if total - first - held + headroom > pool.num_free + freed:
                return False
        return True

    def admit(self, sequence: Sequence, hit: int) -> None:
        """Fills the tables: shared blocks for the hit, fresh ones for all other known tokens."""
        total = self.blocks_for(sequence.length)
        sequence.tables = []
        for group, pool in enumerate(self.pools):
            first = self._first_block(group, hit * self.block_size)
            shared = [self._find(pool, sequence.keys[i]) for i in range(first, hit)]
            for block in shared:
                pool.share(block)
            sequence.tables.append([SINK_BLOCK] * first + shared + pool.allocate(total - hit))
        sequence.published = hit
        sequence.computed = sequence.committed = hit * self.block_size

    # Growth

    def missing_blocks(self, sequence: Sequence, tokens: int) -> int:
        """Blocks that each table lacks to hold so many tokens. All tables are equally long."""
        return self.blocks_for(tokens) - len(sequence.tables[0])

    def can_grow(self, blocks: int) -> bool:
        return all(blocks <= pool.num_free for pool in self.pools)

    def grow(self, sequence: Sequence, blocks: int) -> list[list[int]]:
        """Appends blocks to every table and returns them, one list per group."""
        fresh = [pool.allocate(blocks) for pool in self.pools]
        for table, new in zip(sequence.tables, fresh, strict=True):
            table.extend(new)
        return fresh

    def leave_window(self, sequence: Sequence) -> None:
        """Releases blocks that no later token of the sequence can reach.

        Steps under way may still read them; that is safe, because whoever gets them next writes in a later step.
        """
        for group, window in enumerate(self.windows):
            if window is None:
                continue
            table = sequence.tables[group]
            # Blocks are published first, so that the prefix they end stays findable.
            last = min(self._first_block(group, sequence.computed), sequence.published)
            index = last - 1
            while index >= 0 and table[index] != SINK_BLOCK:
                self.pools[group].release([table[index]])
                table[index] = SINK_BLOCK
                index -= 1

    def publish(self, sequence: Sequence) -> None:
        """Enters blocks into the prefix index whose tokens are all known and whose steps are committed."""
        if not self._shares(sequence):
            sequence.published = sequence.committed // self.block_size
            return
        full = min(sequence.committed, len(sequence.tokens)) // self.block_size
        if full <= sequence.published:
            return
        keys = self._keys(sequence, full)
        for table, pool in zip(sequence.tables, self.pools, strict=True):
            for index in range(sequence.published, full):
                if table[index] != SINK_BLOCK:
                    pool.publish(table[index], keys[index])
        sequence.published = full

    def release(self, sequence: Sequence) -> None:
        """Gives back all blocks. They stay findable until someone needs the room."""
        for table, pool in zip(sequence.tables, self.pools, strict=True):
            pool.release(table)
        sequence.tables = []

    def check_idle(self) -> None:
        for pool in self.pools:
            pool.check_idle()

    def _shares(self, sequence: Sequence) -> bool:
        return self.prefix_cache or sequence.request.params.n > 1

    def _keys(self, sequence: Sequence, count: int) -> list[bytes]:
        keys = sequence.keys
        if len(keys) < count:
            request = sequence.request
            own = "" if self.prefix_cache else str(request.id)
            extras = key_extras(salt=request.cache_salt, request=own)
            size = self.block_size
            for index in range(len(keys), count):
                parent = keys[-1] if keys else ROOT_KEY
                keys.append(prefix_key(parent, sequence.tokens[index * size : (index + 1) * size], extras))
        return keys

    def _first_block(self, group: int, computed: int) -> int:
        """First block that a token at position ``computed`` reaches back to."""
        window = self.windows[group]
        return 0 if window is None else max(0, computed - window + 1) // self.block_size

    def _window_held(self, group: int, keys: list[bytes], hit: int) -> bool:
        pool = self.pools[group]
        return self.windows[group] is None or all(
            pool.find(keys[i]) is not None for i in range(self._first_block(group, hit * self.block_size), hit)
        )

    @staticmethod
    def _find(pool: BlockPool, key: bytes) -> int:
        block = pool.find(key)
        assert block is not None, "a prefix block vanished between lookup and use"
        return block
