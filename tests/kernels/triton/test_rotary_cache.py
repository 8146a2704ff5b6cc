"""Rotary embedding and cache write against the plain-torch operations."""

import pytest
import torch

from paceline.kernels.norm import rms_norm_reference
from paceline.kernels.rotary import rotary_table, rotate_
from paceline.kernels.triton.rotary_cache import rotary_cache, rotary_cos_sin

KV_HEADS, BLOCK_SIZE, MAX_POSITION = 2, 16, 100


@pytest.mark.parametrize(
    ("q_heads", "head_dim", "splits", "norm", "by_slots"),
    [(8, 64, 1, False, False), (6, 96, 3, True, False), (14, 128, 2, True, True), (2, 256, 1, False, True)],
)
def test_queries_and_cache(q_heads, head_dim, splits, norm, by_slots, dtype, device, rng, check_close):
    def random(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=rng, device=device).to(dtype)

    tokens, heads = 7, q_heads + 2 * KV_HEADS
    rows = torch.tensor([0, 0, 0, 1, 1, 2, 2], dtype=torch.int32, device=device)
    positions = torch.tensor([14, 15, 16, 0, 1, 98, 99], dtype=torch.int32, device=device)
    table = torch.randperm(21, generator=rng, device=device).view(3, 7).int() + 1
    partial = random(splits, tokens, heads * head_dim, dtype=torch.float32 if splits > 1 else dtype)
    inverse = 1 / 10000 ** (torch.arange(0, head_dim, 2, device=device) / head_dim)
    q_norm, k_norm = random(head_dim, dtype=dtype), random(head_dim, dtype=dtype)
    # Keys and values of a block side by side: the stride between blocks is not the size of one.
    cache = torch.zeros(22, 2, KV_HEADS, BLOCK_SIZE, head_dim, dtype=dtype, device=device)
    slots = table[rows.long(), positions.long() // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    query = rotary_cache(
        partial if splits > 1 else partial[0],
        positions,
        rotary_cos_sin(inverse, MAX_POSITION, 1.25),
        cache[:, 0],
        cache[:, 1],
        **({"slots": slots} if by_slots else {"rows": rows, "block_table": table}),
        **({"q_norm": q_norm, "k_norm": k_norm} if norm else {}),
        dtype=dtype,
    )

    expected = partial.float().sum(0).view(tokens, heads, head_dim)
    if norm:
        expected[:, :q_heads] = rms_norm_reference(expected[:, :q_heads], q_norm.float(), 1e-6)
        expected[:, q_heads:-KV_HEADS] = rms_norm_reference(expected[:, q_heads:-KV_HEADS], k_norm.float(), 1e-6)
    rotate_(expected[:, :-KV_HEADS], *rotary_table(positions.long(), inverse, 1.25, torch.float32))
    assert query.dtype == dtype
    check_close(query, expected[:, :q_heads])
    block, offset = slots.long() // BLOCK_SIZE, slots.long() % BLOCK_SIZE
    check_close(cache[block, 0, :, offset], expected[:, q_heads:-KV_HEADS])
    check_close(cache[block, 1, :, offset], expected[:, -KV_HEADS:])
    cache[block, :, :, offset] = 0
    assert not cache.any(), "wrote outside the tokens' slots"


def test_float8_cache_is_scaled_and_saturates(device, rng, check_close):
    tokens, q_heads, head_dim, scale = 3, 2, 64, 0.5
    qkv = torch.randn(tokens, (q_heads + 2 * KV_HEADS) * head_dim, generator=rng, device=device)
    qkv[0, -1] = 1e6
    keys = torch.zeros(2, KV_HEADS, BLOCK_SIZE, head_dim, dtype=torch.float8_e4m3fn, device=device)
    values = torch.zeros_like(keys)
    slots = torch.tensor([16, 17, 20], dtype=torch.int32, device=device)
    cos_sin = rotary_cos_sin(torch.ones(head_dim // 2, device=device), 8)
    rotary_cache(qkv, torch.zeros_like(slots), cos_sin, keys, values, slots=slots, k_scale=scale, v_scale=scale)
    expected = qkv.view(tokens, -1, head_dim)
    offset = slots.long() - 16
    # Three bits of mantissa err by 2.6% (root mean square); the interpreter rounds worse.
    tolerance = 3e-2 if device.type == "cuda" else 8e-2
    check_close(keys[1][:, offset].float().transpose(0, 1) * scale, expected[:, q_heads:-KV_HEADS], tolerance)
    assert values[1, -1, 0, -1].float() * scale == 448 * scale
    check_close(values[1][:, offset[1:]].float().transpose(0, 1) * scale, expected[1:, -KV_HEADS:], tolerance)


def test_mixed_up_arguments_are_refused(device):
    cache = torch.zeros(2, KV_HEADS, BLOCK_SIZE, 64, device=device)
    positions = torch.zeros(1, dtype=torch.int32, device=device)
    qkv, cos_sin = torch.zeros(1, 6 * 64, device=device), torch.zeros(8, 64, device=device)
    with pytest.raises(ValueError, match="either slots, or rows"):
        rotary_cache(qkv, positions, cos_sin, cache, cache)
    with pytest.raises(ValueError, match="q_norm"):
        rotary_cache(qkv, positions, cos_sin, cache, cache, slots=positions, q_norm=cos_sin[0])
    with pytest.raises(ValueError, match="contiguous blocks"):
        rotary_cache(qkv, positions, cos_sin, cache.transpose(1, 2), cache.transpose(1, 2), slots=positions)
