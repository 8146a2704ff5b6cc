"""Prefill attention against the reference, one token and one key at a time."""

import pytest
import torch

from paceline.kernels.attention import paged_attention
from paceline.kernels.triton.attention_prefill import PrefillTiles, gather_kv, prefill_attention, prefill_sdpa

QUERIES = [40, 1, 0, 17, 33]
CONTEXTS = [40, 70, 5, 48, 97]
SMALL = PrefillTiles(queries=32, keys=32, warps=4, stages=2)


class Case:
    """A cache with random blocks for rows of ``CONTEXTS`` tokens; blocks that nobody owns hold NaN."""

    def __init__(self, q_heads, kv_heads, head_dim, block_size, dtype, device, rng, cache_dtype=None):
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
        self.start = torch.tensor([0, *QUERIES], device=device).cumsum(0).int()
        self.query = random(sum(QUERIES), q_heads, head_dim)
        self.block_size = block_size
        for row, context in enumerate(CONTEXTS):
            if context % block_size:
                last = self.table[row, context // block_size].long()
                for cache in (self.keys, self.values):
                    cache[last, :, context % block_size :] = float("nan")

    def attend(self, **options):
        options.setdefault("tiles", SMALL)
        caches = (self.keys, self.values, self.table)
        return prefill_attention(self.query, *caches, self.start, self.context, max(QUERIES), **options)

    def reference(self, window=None, k_scale=1.0, v_scale=1.0):
        keys, values = (
            cache.float().mul(scale).transpose(1, 2).flatten(0, 1)
            for cache, scale in ((self.keys, k_scale), (self.values, v_scale))
        )
        return paged_attention(
            self.query.float(), keys, values, self.start, self.context, self.table, self.block_size, window
        )


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "block_size", "window"),
    [
        (8, 2, 64, 16, None),
        (4, 1, 128, 64, None),
        (3, 1, 96, 16, 20),
        (2, 2, 256, 128, 50),
        (7, 1, 64, 16, 1),
    ],
)
def test_rows_with_and_without_cached_prefix(
    q_heads, kv_heads, head_dim, block_size, window, dtype, device, rng, check_close
):
    """First chunks, later chunks, one token, and none at all (failure 59: an empty query)."""
    case = Case(q_heads, kv_heads, head_dim, block_size, dtype, device, rng)
    if window:  # blocks that no query sees any more are another row's
        for row, (context, queries) in enumerate(zip(CONTEXTS, QUERIES, strict=True)):
            case.table[row, : max(0, context - queries - window + 1) // block_size] = 1 << 20
    check_close(case.attend(window=window), case.reference(window))


def test_default_tiles(dtype, device, rng, check_close):
    case = Case(8, 2, 64, 16, dtype, device, rng)
    check_close(case.attend(tiles=None), case.reference())


def test_float8_cache(dtype, device, rng, check_close):
    case = Case(4, 2, 64, 16, dtype, device, rng, cache_dtype=torch.float8_e4m3fn)
    check_close(case.attend(k_scale=0.5, v_scale=3.0), case.reference(k_scale=0.5, v_scale=3.0))


@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn])
def test_gather(cache_dtype, dtype, device, rng, check_close):
    case = Case(2, 2, 96, 16, dtype, device, rng, cache_dtype)
    keys, values = gather_kv(case.keys, case.values, case.table[4], 97, dtype, k_scale=0.5, v_scale=2.0)
    for gathered, cache, scale in ((keys, case.keys, 0.5), (values, case.values, 2.0)):
        expected = cache.float()[case.table[4].long()].transpose(0, 1).flatten(1, 2)[:, :97]
        check_close(gathered[0], expected * (scale if cache_dtype else 1.0))


@pytest.mark.parametrize("row", [0, 4])
def test_sdpa_of_one_row(row, dtype, device, rng, check_close):
    """Row 0 has no cached prefix, row 4 has one."""
    if device.type == "cuda" and dtype == torch.float32:
        pytest.skip("cuDNN's attention is for half precision")
    case = Case(8, 2, 64, 16, dtype, device, rng)
    span = slice(int(case.start[row]), int(case.start[row + 1]))
    out = prefill_sdpa(case.query[span], case.keys, case.values, case.table[row], CONTEXTS[row])
    check_close(out, case.reference()[span])


def test_wrong_shapes_are_refused(device, rng):
    case = Case(3, 2, 64, 16, torch.float16, device, rng)
    with pytest.raises(ValueError, match="evenly"):
        case.attend()
    case.query = case.query[:, :2]
    with pytest.raises(ValueError, match="contiguous"):
        case.attend()
