"""Norm, rotary embedding and gate against formulas written another way."""

import math

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from paceline.kernels.activation import silu_mul
from paceline.kernels.norm import add_rms_norm, rms_norm, rms_norm_reference
from paceline.kernels.rotary import rotary_table, rotate_


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 576), (5, 3, 64)])
def test_rms_norm(dtype, shape):
    x = torch.randn(shape).to(dtype) * 3
    weight = torch.randn(shape[-1]).to(dtype)
    wide = x.double()
    expected = weight.double() * wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    for function in (rms_norm, rms_norm_reference):
        result = function(x, weight, 1e-5)
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)


def test_rms_norm_takes_a_strided_view():
    x = torch.randn(4, 9, 16)
    weight = torch.randn(16)
    torch.testing.assert_close(rms_norm(x[:, 2:5], weight, 1e-6), rms_norm_reference(x[:, 2:5].clone(), weight, 1e-6))


def test_add_rms_norm_returns_the_sum_as_the_residual():
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    total = x + residual
    normed, kept = add_rms_norm(x, residual, weight, 1e-6)
    torch.testing.assert_close(kept, total, rtol=0, atol=0)
    torch.testing.assert_close(normed, rms_norm_reference(total, weight, 1e-6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_equals_transformers(dtype):
    positions = torch.tensor([0, 1, 7, 4000])
    frequencies = 10000.0 ** -(torch.arange(0, 32, 2) / 32)
    angles = positions[:, None].float() * frequencies
    q, k = torch.randn(4, 6, 32).to(dtype), torch.randn(4, 2, 32).to(dtype)
    cos, sin = (torch.cat((f(angles), f(angles)), -1).mul(1.3).to(dtype) for f in (torch.cos, torch.sin))
    expected = torch.cat(apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1), 1)
    both = torch.cat((q, k, torch.zeros(4, 2, 32, dtype=dtype)), 1)
    rotate_(both[:, :8], *rotary_table(positions, frequencies, 1.3, dtype))
    torch.testing.assert_close(both[:, :8], expected, rtol=2 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)
    assert not both[:, 8:].any(), "the rest of the tensor is left alone"


def test_silu_mul():
    gate, up = torch.randn(5, 12), torch.randn(5, 12)
    expected = [
        [g / (1 + math.exp(-g)) * u for g, u in zip(gs, us, strict=True)]
        for gs, us in zip(gate.tolist(), up.tolist(), strict=True)
    ]
    torch.testing.assert_close(silu_mul(torch.cat((gate, up), -1)), torch.tensor(expected))
