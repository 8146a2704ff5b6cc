"""The GPU's attention backend against the CPU's, under Triton's interpreter where there is no GPU."""

import pytest
import torch

import interpreted  # noqa: F401
from paceline.layers.attention import AttentionBatch, AttentionSpec, HeadNorms
from paceline.layers.gather_attention import GatherAttention
from paceline.layers.kv_cache import KVLayout
from paceline.layers.paged_attention import PagedAttention, decode_cut

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 4, 2, 32, 16
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def spec(device: torch.device) -> AttentionSpec:
    return AttentionSpec(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        inverse_frequencies=torch.linspace(1, 0.01, HEAD_DIM // 2, device=device),
        rope_scale=1.1,
        max_position=400,
        norm_eps=1e-5,
    )


@pytest.mark.parametrize("window", [None, 21])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    "steps",
    [
        [([30, 7], [30, 7]), ([1, 1], [31, 8]), ([1, 1], [32, 9])],
        [([40, 5], [40, 5]), ([1, 19], [41, 24]), ([1, 1], [42, 25])],
    ],
    ids=["then decode", "mixed"],
)
def test_equals_the_backend_of_the_cpu(steps, normed, window):
    torch.manual_seed(0)
    layout = KVLayout(
        layer_groups=(0,), num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, block_size=BLOCK, dtype=torch.float32
    )
    table = torch.tensor([[3, 1, 6], [2, 5, 4]])
    weights = HeadNorms(torch.rand(HEAD_DIM) + 0.5, torch.rand(HEAD_DIM) + 0.5) if normed else None
    fast_weights = HeadNorms(weights.query.to(DEVICE), weights.key.to(DEVICE)) if weights else None
    plain, fast = GatherAttention(spec(torch.device("cpu")), torch.float32), PagedAttention(spec(DEVICE), torch.float32)
    plain_cache = plain.make_cache(layout, [7], torch.device("cpu"))
    fast_cache = fast.make_cache(layout, [7], DEVICE)
    for counts, contexts in steps:
        qkv = torch.randn(sum(counts), (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        batch = AttentionBatch.of(counts, contexts, [table])
        expected = plain.attend(plain.plan(batch, 0, window, plain_cache), qkv.clone(), weights, plain_cache, 0)
        batch = AttentionBatch.of(counts, contexts, [table.int().to(DEVICE)])
        got = fast.attend(fast.plan(batch, 0, window, fast_cache), qkv.to(DEVICE), fast_weights, fast_cache, 0)
        torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-4)


def test_partial_sums_are_added_up():
    torch.manual_seed(0)
    layout = KVLayout(
        layer_groups=(0,), num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, block_size=BLOCK, dtype=torch.float32
    )
    table = torch.tensor([[1], [2]], dtype=torch.int32, device=DEVICE)
    parts = torch.randn(3, 4, (HEADS + 2 * KV_HEADS) * HEAD_DIM, device=DEVICE)
    backend = PagedAttention(spec(DEVICE), torch.float32)
    results = []
    for qkv in (parts, parts.sum(0)):
        cache = backend.make_cache(layout, [3], DEVICE)
        batch = AttentionBatch.of([1, 3], [1, 3], [table])
        results.append(backend.attend(backend.plan(batch, 0, None, cache), qkv, None, cache, 0))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_cut(itemsize, head_dim):
    """Programs that share a row: none for few tokens, fewer for more rows, and never more than there is room for."""
    most = 1 << 20
    for heads in (1, 8, 32, 33, 64, 128, 129, 8192):
        tiles, splits = decode_cut(heads, 131072, head_dim, itemsize, 132)
        assert 1 <= splits <= most
        assert splits == 1 or heads * splits <= 4 * 132
        most = splits if heads not in (33, 64) else most
        assert decode_cut(heads, 127, head_dim, itemsize, 132) == (tiles, 1)
        assert decode_cut(heads, 256, head_dim, itemsize, 132)[1] <= 2
    assert decode_cut(8, 2048, head_dim, itemsize, 132)[1] == 16
