"""Attention backends against the naive reference, and what rows may not do to each other."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.kernels.attention import paged_attention
from paceline.layers import gather_attention
from paceline.layers.attention import AttentionBatch, AttentionSpec
from paceline.layers.attention_backends import attention_backend
from paceline.layers.kv_cache import KVCache, KVLayout

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16
CPU = torch.device("cpu")


def paged(rows, block_size, dtype=torch.float32, seed=0):
    """A cache full of random numbers, random tables and queries for rows of (tokens in this step, context)."""
    generator = torch.Generator().manual_seed(seed)
    blocks = [-(-context // block_size) for _, context in rows]
    order = torch.randperm(sum(blocks), generator=generator) + 1
    table = torch.zeros(len(rows), max(blocks) + 1, dtype=torch.int64)
    for row, ids in enumerate(order.split(blocks)):
        table[row, : len(ids)] = ids
    layout = KVLayout(layer_groups=(0,), num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, block_size=block_size, dtype=dtype)
    cache = KVCache(layout, [sum(blocks) + 1])
    cache.data[0].copy_(torch.randn(cache.data[0].shape, generator=generator))
    batch = AttentionBatch.of([n for n, _ in rows], [context for _, context in rows], [table])
    query = torch.randn(sum(n for n, _ in rows), HEADS, HEAD_DIM, generator=generator).to(dtype)
    return query, cache, batch


def spec(head_dim=HEAD_DIM):
    return AttentionSpec(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=head_dim,
        inverse_frequencies=torch.ones(head_dim // 2),
        rope_scale=1.0,
        max_position=200,
        norm_eps=1e-6,
    )


def attend(query, cache, batch, window=None):
    backend = attention_backend(spec(), CPU, query.dtype, query.dtype)
    assert isinstance(backend, gather_attention.GatherAttention)
    return backend.read(backend.plan(batch, 0, window, cache), query, cache, 0).view_as(query)


def reference(query, cache, batch, window=None):
    return paged_attention(
        query,
        cache.keys(0),
        cache.values(0),
        batch.query_start,
        batch.context_len,
        batch.block_tables[0],
        cache.block_size,
        window,
    )


def tokens_of_context(most):
    return st.integers(1, most).flatmap(lambda context: st.tuples(st.integers(0, context), st.just(context)))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(tokens_of_context(90), min_size=1, max_size=5),
    block_size=st.sampled_from([4, 8, 16, 32, 64]),
    window=st.sampled_from([None, 1, 5, 16, 200]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_equals_the_reference_over_random_tables(rows, block_size, window, dtype, seed):
    if not any(n for n, _ in rows):
        rows = [(1, rows[0][1])]
    query, cache, batch = paged(rows, block_size, dtype, seed)
    expected = reference(query, cache, batch, window)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(attend(query, cache, batch, window), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window", [None, 7, 40])
def test_long_chunks_are_cut_into_spans(monkeypatch, window):
    monkeypatch.setattr(gather_attention, "MASKED_TOKENS", 16)
    query, cache, batch = paged([(50, 80), (1, 33), (33, 33), (16, 17)], 8)
    torch.testing.assert_close(
        attend(query, cache, batch, window), reference(query, cache, batch, window), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_alone_and_among_others(window, dtype):
    rows = [(1, 30), (12, 40), (1, 5), (20, 20), (0, 9), (1, 64), *((1, 40 + row) for row in range(7))]
    query, cache, batch = paged(rows, 16, dtype)
    together = attend(query, cache, batch, window)
    for row, (n, context) in enumerate(rows):
        if n:
            alone = AttentionBatch.of([n], [context], [batch.block_tables[0][row : row + 1]])
            tokens = slice(batch.query_start[row], batch.query_start[row + 1])
            close = 1e-6 if dtype == torch.float32 else 1e-2
            torch.testing.assert_close(
                attend(query[tokens], cache, alone, window), together[tokens], rtol=close, atol=close
            )


@pytest.mark.parametrize("window", [None, 9])
def test_stale_and_foreign_slots_are_never_read(window):
    """Failure 76, 77: what lies past a context, before a window, in the sink or in free blocks may be anything."""
    rows = [(1, 30), (12, 41), (3, 3), (1, 37), (1, 21)]
    query, cache, batch = paged(rows, 16)
    expected = attend(query, cache, batch, window)
    reached = torch.zeros(len(cache.data[0]), dtype=torch.bool)
    for row, (n, context) in enumerate(rows):
        first = 0 if window is None else max(0, context - n - window + 1)
        for position in range(first, context):
            reached[batch.block_tables[0][row, position // 16] * 16 + position % 16] = True
    cache.data[0][~reached] = torch.nan
    assert torch.equal(attend(query, cache, batch, window), expected)


def test_positions_and_slots():
    table = torch.tensor([[3, 1, 0], [2, 4, 5]])
    batch = AttentionBatch.of([1, 3], [5, 9], [table])
    assert batch.query_start.tolist() == [0, 1, 4]
    assert batch.positions.tolist() == [4, 6, 7, 8]
    assert batch.slots(0, 4).tolist() == [4, 4 * 4 + 2, 4 * 4 + 3, 5 * 4]


def test_backends_refuse_what_they_do_not_serve():
    with pytest.raises(ValueError, match=r"gather.*float64"):
        attention_backend(spec(64), CPU, torch.float64, torch.float64)
    with pytest.raises(ValueError, match=r"gather.*float8.*cpu"):
        attention_backend(spec(), CPU, torch.bfloat16, torch.float8_e4m3fn)
