import logging

import pytest
import torch

from paceline.engine.config import EngineConfig
from paceline.engine.sizes import Sizes
from paceline.layers.kv_cache import KVLayout
from paceline.runner.kv_capacity import KVCapacity, kv_capacity

LAYOUT = KVLayout(layer_groups=(0, 1, 1), num_kv_heads=2, head_dim=8, block_size=4, dtype=torch.float32)
BLOCK = 3 * 4 * 2 * 2 * 8 * 4  # layers, tokens, keys and values, heads, features, bytes


def config(**fields) -> EngineConfig:
    return EngineConfig(model="x", block_size=4, **fields)


def capacity(wanted: EngineConfig, max_position: int, available: int, **more) -> KVCapacity:
    return kv_capacity(wanted, Sizes.of(wanted, "cpu"), LAYOUT, max_position, available, **more)


def test_share_of_free_memory():
    found = capacity(config(kv_cache_share=0.5, max_num_seqs=10), 100, 2 * 60 * BLOCK)
    assert (found.num_blocks, found.max_model_len, found.bytes) == (60, 100, 60 * BLOCK)


def test_no_more_than_all_sequences_can_use():
    found = capacity(config(max_num_seqs=3, kv_cache_bytes=1000 * BLOCK), 10, 1 << 30)
    assert found.num_blocks == 3 * 3 + 1  # and the sink


def test_the_longest_sequence_fits_exactly():
    wanted = config(max_model_len=101, kv_cache_bytes=27 * BLOCK)
    assert capacity(wanted, 200, 1 << 30).max_model_len == 101


def test_asking_for_more_than_fits_is_an_error():
    wanted = config(max_model_len=101, kv_cache_bytes=27 * BLOCK - 1)
    with pytest.raises(ValueError, match=r"one sequence of 101 tokens takes .* lower max_model_len"):
        capacity(wanted, 200, 1 << 30)


def test_not_asking_reduces_the_context_and_says_so(caplog):
    with caplog.at_level(logging.WARNING):
        found = capacity(config(kv_cache_bytes=27 * BLOCK - 1), 200, 1 << 30)
    assert (found.num_blocks, found.max_model_len) == (26, 100)
    assert "max_model_len is 100 instead of the model's 200" in caplog.text


def test_not_even_one_block():
    with pytest.raises(ValueError, match="more memory"):
        capacity(config(kv_cache_bytes=2 * BLOCK - 1), 200, 1 << 30)


def test_longer_than_the_model_was_made_for():
    with pytest.raises(ValueError, match="max_model_len=201 is more than the 200"):
        capacity(config(max_model_len=201), 200, 1 << 30)


def test_more_than_is_free_is_warned_about(caplog):
    with caplog.at_level(logging.WARNING):
        capacity(config(kv_cache_bytes=100 * BLOCK), 8, 50 * BLOCK)
    assert "kv_cache_bytes" in caplog.text


def test_tables_of_all_sequences_must_fit():
    tables = 8 * 2 * 40_000 * (101 + 2 * 26)  # rows; tokens, and entries of two block tables
    wanted = config(max_num_seqs=40_000, max_model_len=100, kv_cache_bytes=60 * BLOCK)
    assert capacity(wanted, 100, tables).num_blocks == 60
    with pytest.raises(ValueError, match=r"^max_num_seqs=40000 .* lower max_num_seqs"):
        capacity(wanted, 100, tables - 1)
