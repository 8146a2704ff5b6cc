"""SiLU times up against plain torch in double precision."""

import pytest
import torch
import torch.nn.functional as F

from paceline.kernels.fp8 import quantize_rows
from paceline.kernels.triton import activation
from paceline.kernels.triton.activation import silu_mul, silu_mul_fp8

SHAPES = [(1, 64), (3, 100), (2, 2500)]


def inputs(rng, device, dtype, tokens, width):
    gate_up = (torch.randn(tokens, 2 * width, generator=rng, device=device) * 2).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    return gate_up, F.silu(gate) * up


@pytest.mark.parametrize(("tokens", "width"), SHAPES)
def test_product(device, dtype, rng, check_close, tokens, width):
    gate_up, expected = inputs(rng, device, dtype, tokens, width)
    before = gate_up.clone()
    out = silu_mul(gate_up)
    assert out.dtype == dtype
    check_close(out, expected)
    assert torch.equal(gate_up, before)
    into = torch.full_like(out, torch.nan)
    assert silu_mul(gate_up, out=into) is into
    assert torch.equal(into, out)


@pytest.mark.parametrize("row_block", [64, 16384])
@pytest.mark.parametrize(("tokens", "width"), SHAPES)
def test_fp8(device, dtype, rng, check_close, monkeypatch, tokens, width, row_block):
    monkeypatch.setattr(activation, "_ROW_BLOCK", row_block)
    gate_up, expected = inputs(rng, device, dtype, tokens, min(width, 300))
    expected, expected_scale = quantize_rows(expected.float())
    out, scale = silu_mul_fp8(gate_up)
    assert out.dtype == torch.float8_e4m3fn
    check_close(scale, expected_scale, 1e-5)
    check_close(out.float() * scale[:, None], expected.float() * expected_scale[:, None], 0.08)


def test_row_of_zeros(device, dtype):
    out, scale = silu_mul_fp8(torch.zeros(2, 80, dtype=dtype, device=device))
    assert torch.equal(out.float(), torch.zeros(2, 40, device=device))
    assert torch.equal(scale, torch.ones(2, device=device))


def test_no_tokens(device, dtype):
    assert silu_mul(torch.zeros(0, 80, dtype=dtype, device=device)).shape == (0, 40)
