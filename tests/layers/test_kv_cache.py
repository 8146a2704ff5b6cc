import pytest
import torch

from paceline.layers.kv_cache import KVCache, KVLayout


def layout(**changes):
    fields = {"layer_groups": (0, 1, 1), "num_kv_heads": 2, "head_dim": 8, "block_size": 4, "dtype": torch.bfloat16}
    return KVLayout(**{**fields, **changes})


def test_bytes_per_block_are_what_the_tensors_take():
    cache = KVCache(layout(), [5, 7])
    for group, layers in ((0, [0]), (1, [1, 2])):
        assert cache.bytes_per_block(group) * cache.num_blocks[group] == sum(cache.data[i].nbytes for i in layers)


def test_write_stores_keys_and_values_at_their_slots():
    cache = KVCache(layout(dtype=torch.float32), [5, 7])
    new = torch.randn(3, 4, 8)
    cache.write(1, torch.tensor([9, 4, 27]), new)
    assert torch.equal(cache.keys(1)[[9, 4, 27]], new[:, :2])
    assert torch.equal(cache.values(1)[[9, 4, 27]], new[:, 2:])
    assert sum(data.count_nonzero() for data in cache.data) == new.count_nonzero()


def test_padding_goes_to_the_sink_and_nowhere_else():
    """Failure 76: padded rows write to block 0; the last block in particular keeps what it holds."""
    cache = KVCache(layout(dtype=torch.float32), [5, 7])
    for data in cache.data:
        data.fill_(torch.pi)
    padding = torch.zeros(6, dtype=torch.int64)
    for layer in range(3):
        cache.write(layer, padding, torch.randn(6, 4, 8))
        assert (cache.data[layer][cache.block_size :] == torch.pi).all()
        assert cache.data[layer][0].isfinite().all()


def test_a_slot_outside_the_cache_is_an_error():
    """Failure 76: slot -1 is no slot, and never the last one."""
    cache = KVCache(layout(dtype=torch.float32), [5, 7])
    for slot in (-1, 20):
        with pytest.raises((IndexError, RuntimeError)):
            cache.write(0, torch.tensor([slot]), torch.ones(1, 4, 8))
    assert not cache.data[0].any()


def test_every_group_needs_its_block_count():
    with pytest.raises(ValueError, match="1 block counts for 2 KV groups"):
        KVCache(layout(), [5])
