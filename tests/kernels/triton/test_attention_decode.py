"""Decode attention against the reference, one token and one key at a time."""

import pytest
import torch

from paceline.kernels.attention import paged_attention
from paceline.kernels.triton.attention_decode import (
    DecodeTiles,
    DecodeWorkspace,
    decode_attention,
    rotary_decode_attention,
)
from paceline.kernels.triton.rotary_cache import rotary_cache, rotary_cos_sin

CONTEXTS = [1, 63, 64, 65, 130]


class Case:
    """A cache with random blocks for rows of ``CONTEXTS`` tokens; blocks that nobody owns hold NaN."""

    def __init__(self, q_heads, kv_heads, head_dim, block_size, dtype, device, rng, cache_dtype=None, window=None):
        def random(*shape):
            return torch.randn(shape, generator=rng, device=device).to(dtype)

        needed = [-(-context // block_size) for context in CONTEXTS]
        order = (torch.randperm(sum(needed), generator=rng, device=device) + 1).int()
        # Entries that no token reaches point past the cache.
        self.table = torch.full((len(CONTEXTS), max(needed)), 1 << 20, dtype=torch.int32, device=device)
        for row, count in enumerate(needed):
            self.table[row, :count], order = order[:count], order[count:]
        shape = (sum(needed) + 1, kv_heads, block_size, head_dim)
        self.keys, self.values = (random(*shape).to(cache_dtype or dtype) for _ in range(2))
        self.context = torch.tensor(CONTEXTS, dtype=torch.int32, device=device)
        self.query = random(len(CONTEXTS), q_heads, head_dim)
        self.qkv = random(len(CONTEXTS), (q_heads + 2 * kv_heads) * head_dim)
        self.block_size = block_size
        for row, context in enumerate(CONTEXTS):
            if window:  # blocks that the token does not see any more are another row's
                self.table[row, : max(0, context - window) // block_size] = 1 << 20
            if context % block_size:
                last = self.table[row, context // block_size].long()
                for cache in (self.keys, self.values):
                    cache[last, :, context % block_size :] = float("nan")

    def reference(self, query, window=None, k_scale=1.0, v_scale=1.0):
        rows = len(CONTEXTS)
        start = torch.arange(rows + 1)
        keys, values = (
            cache.float().mul(scale).transpose(1, 2).flatten(0, 1)
            for cache, scale in ((self.keys, k_scale), (self.values, v_scale))
        )
        return paged_attention(query.float(), keys, values, start, self.context, self.table, self.block_size, window)


SHAPES = [
    (8, 2, 64, 16, 1, None),
    (8, 2, 128, 64, 3, None),
    (7, 1, 96, 16, 2, 50),
    (4, 2, 256, 128, 5, 70),
    (20, 1, 64, 16, 4, 1),
]
"""Query heads, kv heads, head_dim, block size, splits, window."""
FUSED_TILES = [DecodeTiles(32, 1, 2), DecodeTiles(32, 4, 2), DecodeTiles(16, 2, 3, early=True)]


@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim", "block_size", "splits", "window"), SHAPES)
def test_one_token_a_row(q_heads, kv_heads, head_dim, block_size, splits, window, dtype, device, rng, check_close):
    case = Case(q_heads, kv_heads, head_dim, block_size, dtype, device, rng, window=window)
    out = decode_attention(
        case.query,
        case.keys,
        case.values,
        case.table,
        case.context,
        num_splits=splits,
        window=window,
        tiles=DecodeTiles(tokens=32, warps=4, stages=2),
    )
    check_close(out, case.reference(case.query, window))


@pytest.mark.parametrize("splits", [1, 3])
def test_rows_without_context_are_left_alone(splits, dtype, device, rng, check_close):
    case = Case(8, 2, 32, 16, dtype, device, rng)
    context = case.context.clone()
    context[3:] = 0
    out = torch.full_like(case.query, torch.nan)
    decode_attention(case.query, case.keys, case.values, case.table, context, num_splits=splits, out=out)
    check_close(out[:3], case.reference(case.query)[:3])
    assert out[3:].isnan().all()


@pytest.mark.parametrize("tiles", FUSED_TILES, ids=str)
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim", "block_size", "splits", "window"), SHAPES)
def test_fused_equals_rotary_then_attention(
    q_heads, kv_heads, head_dim, block_size, splits, window, tiles, dtype, device, rng, check_close
):
    case = Case(q_heads, kv_heads, head_dim, block_size, dtype, device, rng, window=window)
    inverse = 1 / 10000 ** (torch.arange(0, head_dim, 2, device=device) / head_dim)
    cos_sin = rotary_cos_sin(inverse, 256)
    weights = torch.rand(2, head_dim, generator=rng, device=device).to(dtype)
    norms = {"q_norm": weights[0], "k_norm": weights[1]} if window else {}
    partial = torch.stack((case.qkv.float() * 0.25, case.qkv.float() * 0.75))
    keys, values = case.keys.clone(), case.values.clone()
    out = rotary_decode_attention(
        partial,
        cos_sin,
        keys,
        values,
        case.table,
        case.context,
        num_splits=splits,
        window=window,
        dtype=dtype,
        tiles=tiles,
        **norms,
    )
    rows = torch.arange(len(CONTEXTS), dtype=torch.int32, device=device)
    query = rotary_cache(
        case.qkv, case.context - 1, cos_sin, case.keys, case.values, rows=rows, block_table=case.table, **norms
    )
    check_close(out, case.reference(query, window))
    check_close(keys.nan_to_num(), case.keys.nan_to_num())
    check_close(values.nan_to_num(), case.values.nan_to_num())


FLOAT8_SHAPES = [(8, 2, 64, 16, 2, None), (7, 1, 96, 64, 1, 50), (4, 2, 256, 128, 5, None)]


@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim", "block_size", "splits", "window"), FLOAT8_SHAPES)
def test_float8_cache(q_heads, kv_heads, head_dim, block_size, splits, window, dtype, device, rng, check_close):
    case = Case(
        q_heads, kv_heads, head_dim, block_size, dtype, device, rng, cache_dtype=torch.float8_e4m3fn, window=window
    )
    scales = {"k_scale": 0.5, "v_scale": 3.0}
    caches = (case.keys, case.values, case.table, case.context)
    out = decode_attention(case.query, *caches, num_splits=splits, window=window, **scales)
    check_close(out, case.reference(case.query, window, **scales))


@pytest.mark.parametrize("tiles", FUSED_TILES, ids=str)
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim", "block_size", "splits", "window"), FLOAT8_SHAPES)
def test_fused_float8(q_heads, kv_heads, head_dim, block_size, splits, window, tiles, dtype, device, rng, check_close):
    """Attention to what was written, which is close to the keys and values (the interpreter rounds float8 badly)."""
    case = Case(
        q_heads, kv_heads, head_dim, block_size, dtype, device, rng, cache_dtype=torch.float8_e4m3fn, window=window
    )
    inverse = 1 / 10000 ** (torch.arange(0, head_dim, 2, device=device) / head_dim)
    cos_sin = rotary_cos_sin(inverse, 256)
    scales = {"k_scale": 0.5, "v_scale": 3.0}
    options = {"num_splits": splits, "window": window, "tiles": tiles, **scales}
    out = rotary_decode_attention(
        case.qkv, cos_sin, case.keys, case.values, case.table, case.context, dtype=dtype, **options
    )
    shape = (len(CONTEXTS) + 1, kv_heads, 1, head_dim)
    keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
    slots = torch.arange(1, len(CONTEXTS) + 1, device=device)
    query = rotary_cache(case.qkv, case.context - 1, cos_sin, keys, values, slots=slots)
    check_close(out, case.reference(query, window, **scales))
    position = case.context.long() - 1
    block = case.table.gather(1, (position // block_size)[:, None])[:, 0].long()
    for cache, expected, scale in ((case.keys, keys, 0.5), (case.values, values, 3.0)):
        check_close(cache[block, :, position % block_size].float() * scale, expected[1:, :, 0].float(), 0.12)


def test_workspace_is_reused_and_results_repeat(device, rng):
    case = Case(8, 2, 64, 16, torch.float16, device, rng)
    workspace = DecodeWorkspace.of(len(CONTEXTS), 8, 2, 64, 4, device)
    workspace.partial.fill_(float("nan"))
    workspace.lse.fill_(float("nan"))

    def attend(splits):
        arguments = (case.query, case.keys, case.values, case.table, case.context)
        return decode_attention(*arguments, num_splits=splits, workspace=workspace)

    first = attend(4)
    attend(2)
    assert torch.equal(attend(4), first)
    assert torch.isfinite(first).all()
    assert not workspace.counters.any()
    with pytest.raises(ValueError, match="too small"):
        attend(5)


def test_rows_do_not_see_padding_rows(device, rng):
    """Rows of context 1 at the sink block, whatever it holds, change nothing (failure 77)."""
    case = Case(8, 2, 64, 16, torch.float16, device, rng)
    attend = (case.keys, case.values)
    alone = decode_attention(case.query, *attend, case.table, case.context, num_splits=2)
    padding = torch.zeros_like(case.table[:2])
    padded = decode_attention(
        torch.cat((case.query, case.query.new_full((2, 8, 64), 100.0))),
        *attend,
        torch.cat((case.table, padding)),
        torch.cat((case.context, torch.ones_like(case.context[:2]))),
        num_splits=2,
    )
    assert torch.equal(padded[:-2], alone)
    assert torch.isfinite(padded).all()


def test_wrong_shapes_are_refused(device, rng):
    case = Case(6, 2, 64, 16, torch.float16, device, rng)
    caches = (case.keys, case.values, case.table, case.context)
    with pytest.raises(ValueError, match="evenly"):
        decode_attention(case.query[:, :5].contiguous(), *caches, num_splits=1)
    with pytest.raises(ValueError, match="num_splits"):
        decode_attention(case.query, *caches, num_splits=0)
    with pytest.raises(ValueError, match="contiguous"):
        decode_attention(case.query[:, :2], *caches, num_splits=1)
