from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.engine.block_pool import ROOT_KEY, BlockPool, key_extras, prefix_key
from paceline.engine.step import SINK_BLOCK


def test_sink_is_never_handed_out():
    """failure 76: padding writes go to a block that no sequence owns."""
    pool = BlockPool(8)
    assert SINK_BLOCK not in pool.allocate(pool.num_free)
    assert pool.num_free == 0


def test_blocks_are_reused_least_recently_released_first_and_prefix_end_before_beginning():
    pool = BlockPool(5)
    first = pool.allocate(2)
    second = pool.allocate(2)
    for block in first + second:
        pool.publish(block, b"%d" % block)
    pool.release(second)
    pool.release(first)
    assert pool.allocate(4) == [second[1], second[0], first[1], first[0]]


def test_unindexed_blocks_are_reused_before_cached_ones():
    pool = BlockPool(4)
    cached, plain, other = pool.allocate(3)
    pool.publish(cached, b"k")
    pool.release([cached])
    pool.release([plain])
    pool.release([other])
    assert set(pool.allocate(2)) == {plain, other}
    assert pool.find(b"k") == cached


def test_released_block_is_found_until_it_is_reused():
    pool = BlockPool(3)
    [block] = pool.allocate(1)
    pool.publish(block, b"k")
    pool.release([block])
    assert pool.find(b"k") == block
    pool.share(block)
    assert pool.references(block) == 1
    assert pool.num_free == 1
    pool.release([block])
    pool.allocate(2)
    assert pool.find(b"k") is None


def test_double_release_is_an_error():
    """failure 53: a slot must not be freed twice."""
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


def test_first_block_of_a_key_stays():
    pool = BlockPool(4)
    one, two = pool.allocate(2)
    pool.publish(one, b"k")
    pool.publish(two, b"k")
    pool.release([two])
    assert pool.find(b"k") == one
    pool.release([one])
    pool.check_idle()


def test_keys_depend_on_parent_tokens_order_and_extras():
    """failure 55: the key is a collision-resistant hash of everything that the block depends on."""
    keys = [
        prefix_key(ROOT_KEY, [1, 2], b""),
        prefix_key(ROOT_KEY, [2, 1], b""),
        prefix_key(ROOT_KEY, [1], b""),
        prefix_key(prefix_key(ROOT_KEY, [1, 2], b""), [1, 2], b""),
        prefix_key(ROOT_KEY, [1, 2], key_extras(salt="a")),
        prefix_key(ROOT_KEY, [258, 0], b""),
    ]
    assert len(set(keys)) == len(keys)
    assert all(len(key) == 32 for key in keys)


def test_extras_of_different_kinds_never_meet():
    """failure 56: a salt that equals an adapter's name, or that contains another field, gives another key."""
    values = [
        key_extras(salt="x"),
        key_extras(adapter="x"),
        key_extras(adapter="x", salt="y"),
        key_extras(adapter="xsalty"),
        key_extras(salt="y", adapter=""),
        key_extras(),
    ]
    assert len(set(values)) == len(values)
    assert key_extras(salt="y", adapter="x") == values[2]


class PoolMachine(RuleBasedStateMachine):
    """Random use of a pool against a plain model of it."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9)
        self.tables: list[list[int]] = []
        self.next_key = 0

    @rule(count=st.integers(1, 4))
    def allocate(self, count: int) -> None:
        if count <= self.pool.num_free:
            table = self.pool.allocate(count)
            for block in table:
                self.next_key += 1
                self.pool.publish(block, b"%d" % self.next_key)
            self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        table = list(data.draw(st.sampled_from(self.tables)))
        for block in table:
            self.pool.share(block)
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @rule(key=st.integers(1, 50))
    def revive(self, key: int) -> None:
        block = self.pool.find(b"%d" % key)
        if block is not None:
            self.pool.share(block)
            self.tables.append([block])

    @invariant()
    def counts_agree(self) -> None:
        held = [block for table in self.tables for block in table]
        for block in range(1, 9):
            assert self.pool.references(block) == held.count(block)
        assert self.pool.num_free == self.pool.capacity - len(set(held))

    def teardown(self) -> None:
        for table in self.tables:
            self.pool.release(table)
        self.pool.check_idle()


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase


def test_allocation_order_is_total():
    pool = BlockPool(6)
    blocks = pool.allocate(5)
    assert all(low < high for low, high in pairwise(blocks))
