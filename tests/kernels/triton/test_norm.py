"""Normalisation against the plain-torch reference in double precision."""

import pytest
import torch

from paceline.kernels.fp8 import quantize_rows
from paceline.kernels.triton.norm import add_rms_norm, add_rms_norm_fp8, rms_norm, rms_norm_fp8

EPS = 1e-5
SHAPES = [(1, 64), (3, 100), (5, 576), (2, 1025)]


def reference(x, weight):
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.double()


def inputs(rng, device, dtype, tokens, width):
    x = torch.randn(tokens, width, generator=rng, device=device) * 3
    weight = torch.rand(width, generator=rng, device=device) + 0.5
    return x.to(dtype), weight.to(dtype)


@pytest.mark.parametrize(("tokens", "width"), SHAPES)
def test_norm(device, dtype, rng, check_close, tokens, width):
    x, weight = inputs(rng, device, dtype, tokens, width)
    out = rms_norm(x, weight, EPS)
    assert out.dtype == dtype
    check_close(out, reference(x, weight))
    into = torch.full_like(out, torch.nan)
    assert rms_norm(x, weight, EPS, out=into) is into
    assert torch.equal(into, out)


def test_rows_may_be_strided(device, dtype, rng, check_close):
    x, weight = inputs(rng, device, dtype, 4, 96)
    check_close(rms_norm(x[:, :48], weight[:48], EPS), reference(x[:, :48], weight[:48]))


@pytest.mark.parametrize("wide_residual", [False, True])
@pytest.mark.parametrize("splits", [None, 1, 3])
@pytest.mark.parametrize(("tokens", "width"), SHAPES)
def test_sum_and_norm(device, dtype, rng, check_close, tokens, width, splits, wide_residual):
    residual, weight = inputs(rng, device, dtype, tokens, width)
    residual = residual.float() if wide_residual else residual
    if splits is None:
        delta = total = torch.randn(tokens, width, generator=rng, device=device).to(dtype)
    else:
        delta = torch.randn(splits, tokens, width, generator=rng, device=device)
        total = delta.double().sum(0)
    expected = residual.double() + total.double()
    out = add_rms_norm(delta, residual, weight, EPS)
    check_close(residual, expected)
    assert out.dtype == dtype
    check_close(out, reference(residual, weight))


@pytest.mark.parametrize("splits", [None, 2])
def test_fp8(device, dtype, rng, check_close, splits):
    residual, weight = inputs(rng, device, dtype, 5, 300)
    expected, expected_scale = quantize_rows(reference(residual, weight).float())
    out, scale = rms_norm_fp8(residual, weight, EPS)
    assert out.dtype == torch.float8_e4m3fn
    check_close(scale, expected_scale, 1e-5)
    # The interpreter rounds towards zero: up to a unit in the last place, 1/8 of the value.
    check_close(out.float() * scale[:, None], expected.float() * expected_scale[:, None], 0.08)

    delta = torch.randn(*([] if splits is None else [splits]), 5, 300, generator=rng, device=device)
    kept = residual.clone()
    normal = add_rms_norm(delta, kept, weight, EPS)
    out, scale = add_rms_norm_fp8(delta, residual, weight, EPS)
    assert torch.equal(residual, kept)
    check_close(out.float() * scale[:, None], normal.float(), 0.08)


def test_row_of_zeros(device, dtype):
    x = torch.zeros(2, 40, dtype=dtype, device=device)
    out, scale = rms_norm_fp8(x, torch.ones(40, dtype=dtype, device=device), EPS)
    assert torch.equal(out.float(), torch.zeros(2, 40, device=device))
    assert torch.equal(scale, torch.ones(2, device=device))


def test_no_tokens(device, dtype):
    x = torch.zeros(0, 40, dtype=dtype, device=device)
    assert rms_norm(x, torch.ones(40, dtype=dtype, device=device), EPS).shape == (0, 40)
