"""Linear layers of one to four tokens against plain torch in double precision."""

import pytest
import torch
import torch.nn.functional as F

from paceline.kernels.fp8 import quantize_rows
from paceline.kernels.table import GemvConfig
from paceline.kernels.triton.gemv import MAX_ROWS, default_config, gemv
from paceline.kernels.triton.norm import add_rms_norm

EPS = 1e-5
WHOLE = GemvConfig(block_n=2, block_k=128, programs=5, stages=3, warps=4)
SPLIT = GemvConfig(block_n=4, block_k=32, programs=3, stages=2, warps=4)
SHAPES = [(1, 33, 128), (2, 24, 100), (3, 21, 96), (4, 16, 128)]


def inputs(rng, device, dtype, rows, n, k):
    x = torch.randn(rows, k, generator=rng, device=device).to(dtype)
    weight = (torch.randn(n, k, generator=rng, device=device) * k**-0.5).to(dtype)
    bias = torch.randn(n, generator=rng, device=device).to(dtype)
    return x, weight, bias


def normalised(x, weight):
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.double()


@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_product(device, dtype, rng, check_close, rows, n, k):
    x, weight, bias = inputs(rng, device, dtype, rows, n, k)
    expected = x.double() @ weight.double().T + bias.double()
    out = torch.full((rows, n), torch.nan, dtype=dtype, device=device)
    check_close(gemv(x, weight, bias=bias, config=WHOLE, out=out), expected)
    parts = gemv(x, weight, bias=bias, config=SPLIT)
    assert parts.shape == (-(-k // 32), rows, n)
    check_close(parts.sum(0), expected, 1e-3)
    check_close(gemv(x, weight, bias=bias), expected)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("wide_residual", [False, True])
@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_norm_in_front(device, dtype, rng, check_close, rows, n, k, wide_residual, gated):
    x, weight, _ = inputs(rng, device, dtype, rows, 2 * n if gated else n, k)
    x = x.float() if wide_residual else x
    norm_weight = (torch.rand(k, generator=rng, device=device) + 0.5).to(dtype)
    expected = normalised(x, norm_weight) @ weight.double().T
    if gated:
        gate, up = expected.chunk(2, -1)
        expected = F.silu(gate) * up
    out = gemv(x, weight, norm_weight=norm_weight, eps=EPS, gated=gated, config=WHOLE)
    assert out.dtype == dtype
    check_close(out, expected)


@pytest.mark.parametrize("splits", [None, 3])
def test_sum_in_front(device, dtype, rng, check_close, splits):
    x, weight, _ = inputs(rng, device, dtype, 3, 21, 96)
    norm_weight = (torch.rand(96, generator=rng, device=device) + 0.5).to(dtype)
    if splits is None:
        delta = torch.randn(3, 96, generator=rng, device=device).to(dtype)
    else:
        delta = torch.randn(splits, 3, 96, generator=rng, device=device)
    total = torch.full_like(x, torch.nan)
    before = x.clone()
    out = gemv(x, weight, norm_weight=norm_weight, eps=EPS, delta=delta, sum_out=total, config=WHOLE)
    assert torch.equal(x, before)
    add_rms_norm(delta, before, norm_weight, EPS)
    assert torch.equal(total, before)
    check_close(out, normalised(total, norm_weight) @ weight.double().T)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_fp8_weight(device, dtype, rng, check_close, rows, n, k, gated):
    x, weight, bias = inputs(rng, device, dtype, rows, 2 * n if gated else n, k)
    weight, scale = quantize_rows(weight)
    expected = x.double() @ (weight.double() * scale.double()[:, None]).T + bias.double()
    if gated:
        gate, up = expected.chunk(2, -1)
        expected = F.silu(gate) * up
    check_close(gemv(x, weight, bias=bias, weight_scale=scale, gated=gated, config=WHOLE), expected)
    if not gated:
        check_close(gemv(x, weight, bias=bias, weight_scale=scale, config=SPLIT).sum(0), expected, 1e-3)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("k", [576, 4096, 14336])
@pytest.mark.parametrize("rows", range(1, MAX_ROWS + 1))
def test_default_config_has_blocks_of_powers_of_two(rows, k, whole):
    config = default_config(rows, k, whole)
    assert config.block_k.bit_count() == config.block_n.bit_count() == 1
    assert config.block_k >= k or not whole


def test_default_tiles_split_k(device, dtype, rng, check_close):
    x, weight, _ = inputs(rng, device, dtype, 3, 5, 1100)
    parts = gemv(x, weight)
    assert parts.shape == (2, 3, 5)
    check_close(parts.sum(0), x.double() @ weight.double().T, 1e-3)


def test_refusals(device):
    x, weight = torch.zeros(5, 64, device=device), torch.zeros(8, 64, device=device)
    with pytest.raises(ValueError, match="at most 4 rows, not 5"):
        gemv(x, weight)
    with pytest.raises(ValueError, match="cannot split"):
        gemv(x[:1], weight, gated=True, config=SPLIT)
    with pytest.raises(ValueError, match="cannot split"):
        gemv(x[:1], weight, norm_weight=x[0], eps=EPS, config=SPLIT)
    assert gemv(x[:0], weight, config=WHOLE).shape == (0, 8)
