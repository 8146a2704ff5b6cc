"""Linear layers of few tokens against plain torch in double precision."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from paceline.kernels.fp8 import fp8_linear_reference, quantize_rows
from paceline.kernels.table import SkinnyConfig
from paceline.kernels.triton.skinny_linear import MAX_ROWS, default_config, skinny_linear

CONFIG = SkinnyConfig(block_n=32, block_k=32, splits=1, stages=3, warps=4)
SHAPES = [(1, 33, 64), (7, 64, 96), (16, 50, 72), (31, 96, 160), (64, 40, 128)]
"""Rows, n, k: k with whole steps and without, rows at and below each padding."""


def inputs(rng, device, dtype, rows, n, k):
    x = torch.randn(rows, k, generator=rng, device=device).to(dtype)
    weight = (torch.randn(n, k, generator=rng, device=device) * k**-0.5).to(dtype)
    bias = torch.randn(n, generator=rng, device=device).to(dtype)
    return x, weight, bias


@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_product(device, dtype, rng, check_close, rows, n, k):
    x, weight, bias = inputs(rng, device, dtype, rows, n, k)
    out = torch.full((rows, n), torch.nan, dtype=dtype, device=device)
    skinny_linear(x, weight, config=CONFIG, out=out, pdl=x.is_cuda)
    check_close(out, x.double() @ weight.double().T)
    out = skinny_linear(x, weight, bias=bias, config=CONFIG)
    assert out.dtype == dtype
    check_close(out, x.double() @ weight.double().T + bias.double())


@pytest.mark.parametrize("splits", [2, 3, 7])
@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_partial_sums(device, dtype, rng, check_close, rows, n, k, splits):
    """Some splits have no columns at all; the bias counts once."""
    x, weight, bias = inputs(rng, device, dtype, rows, n, k)
    out = torch.full((splits, rows, n), torch.nan, device=device)
    skinny_linear(x, weight, bias=bias, config=replace(CONFIG, splits=splits), out=out)
    check_close(out.sum(0), x.double() @ weight.double().T + bias.double(), 1e-3)


@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_gated(device, dtype, rng, check_close, rows, n, k):
    x, weight, bias = inputs(rng, device, dtype, rows, 2 * n, k)
    gate, up = (x.double() @ weight.double().T + bias.double()).chunk(2, -1)
    check_close(skinny_linear(x, weight, bias=bias, gated=True, config=CONFIG), F.silu(gate) * up)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_fp8_weight_and_tokens(device, rng, check_close, rows, n, k, splits):
    x, weight, bias = inputs(rng, device, torch.float32, rows, n, k)
    (x, x_scale), (weight, weight_scale) = quantize_rows(x), quantize_rows(weight)
    expected = fp8_linear_reference(x, x_scale, weight, weight_scale, bias, torch.float32)
    config = replace(CONFIG, splits=splits)
    out = skinny_linear(
        x, weight, bias=bias, x_scale=x_scale, weight_scale=weight_scale, config=config, dtype=torch.float32
    )
    # Tensor cores sum FP8 products with about 14 bits.
    check_close(out if splits == 1 else out.sum(0), expected, 2e-3)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_fp8_weight_alone(device, dtype, rng, check_close, rows, n, k, gated):
    x, weight, _ = inputs(rng, device, dtype, rows, 2 * n if gated else n, k)
    weight, weight_scale = quantize_rows(weight)
    expected = x.double() @ (weight.double() * weight_scale.double()[:, None]).T
    if gated:
        gate, up = expected.chunk(2, -1)
        expected = F.silu(gate) * up
    check_close(skinny_linear(x, weight, weight_scale=weight_scale, gated=gated, config=CONFIG), expected)


def test_rows_may_be_strided(device, dtype, rng, check_close):
    x, weight, _ = inputs(rng, device, dtype, 5, 40, 64)
    wide = torch.cat([x, torch.full_like(x, torch.nan)], 1)
    check_close(skinny_linear(wide[:, :64], weight, config=CONFIG), x.double() @ weight.double().T)


def test_a_row_does_not_depend_on_the_others(device, dtype, rng):
    x, weight, _ = inputs(rng, device, dtype, 9, 64, 96)
    config = replace(CONFIG, splits=2)
    together = skinny_linear(x, weight, config=config)
    assert torch.equal(skinny_linear(x[4:5], weight, config=config), together[:, 4:5])


def test_default_tiles(device, dtype, rng, check_close):
    x, weight, _ = inputs(rng, device, dtype, 3, 70, 300)
    out = skinny_linear(x, weight)
    check_close(out, x.double() @ weight.double().T)


@pytest.mark.parametrize(
    ("n", "k", "splits"), [(6144, 4096, 4), (4096, 4096, 4), (4096, 14336, 4), (128256, 4096, 1), (576, 1536, 2)]
)
def test_default_config_fills_the_gpu_and_leaves_each_split_some_steps(n, k, splits):
    config = default_config(16, n, k, 2)
    assert config.splits == splits
    assert k // config.splits >= 4 * config.block_k
    assert default_config(16, n, k, 2, gated=True).splits == 1


def test_refusals(device):
    x, weight = torch.zeros(MAX_ROWS + 1, 32, device=device), torch.zeros(64, 32, device=device)
    with pytest.raises(ValueError, match="at most 64 rows, not 65"):
        skinny_linear(x, weight)
    with pytest.raises(ValueError, match="cannot split"):
        skinny_linear(x[:2], weight, gated=True, config=replace(CONFIG, splits=2))
    assert skinny_linear(x[:0], weight, config=CONFIG).shape == (0, 64)
