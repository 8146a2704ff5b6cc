"""FP8 quantisation and products against plain torch."""

import pytest
import torch

from paceline.kernels.fp8 import fp8_linear_reference, quantize_rows
from paceline.kernels.triton.fp8 import fp8_linear, quantize_tokens


@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (3, 100), (5, 1111)])
def test_quantize_tokens(device, dtype, rng, check_close, tokens, width):
    x = (torch.randn(tokens, width, generator=rng, device=device) * 20).to(dtype)
    expected, expected_scale = quantize_rows(x)
    out, scale = quantize_tokens(x)
    assert out.dtype == torch.float8_e4m3fn
    check_close(scale, expected_scale, 1e-6)
    # The interpreter rounds towards zero: up to a unit in the last place, 1/8 of the value.
    check_close(out.float() * scale[:, None], expected.float() * expected_scale[:, None], 0.08)


def test_scale_uses_the_whole_range_and_survives_zeros(device):
    x = torch.tensor([[0.5, -2.0, 1.0], [0.0, 0.0, 0.0]], device=device)
    for out, scale in (quantize_tokens(x), quantize_rows(x)):
        assert out.float().tolist() == [[112.0, -448.0, 224.0], [0.0, 0.0, 0.0]]
        assert scale.tolist() == pytest.approx([2 / 448, 1.0])


def test_rows_may_be_strided(device, dtype, rng):
    x = torch.randn(4, 96, generator=rng, device=device).to(dtype)
    out, scale = quantize_tokens(x[:, :40])
    again, same = quantize_tokens(x[:, :40].contiguous())
    assert torch.equal(out.float(), again.float())
    assert torch.equal(scale, same)


def test_rounding_error_of_the_reference(rng, device):
    """A normal FP8 number is off by at most 1/16 of its value."""
    x = torch.randn(7, 256, generator=rng, device=device)
    out, scale = quantize_rows(x)
    error = (out.float() * scale[:, None] - x).abs()
    assert (error <= x.abs() / 16 + scale[:, None] * 2**-10).all()


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(("tokens", "n", "k"), [(1, 32, 64), (77, 48, 160), (300, 128, 512)])
def test_product(device, rng, check_close, tokens, n, k, fast):
    x, x_scale = quantize_rows(torch.randn(tokens, k, generator=rng, device=device))
    weight, weight_scale = quantize_rows(torch.randn(n, k, generator=rng, device=device))
    bias = torch.randn(n, generator=rng, device=device).to(torch.bfloat16)
    expected = fp8_linear_reference(x, x_scale, weight, weight_scale, None, torch.float32)
    check_close(fp8_linear(x, x_scale, weight, weight_scale, fast_accumulation=fast), expected, 5e-3)
    expected = fp8_linear_reference(x, x_scale, weight, weight_scale, bias, torch.float32)
    check_close(fp8_linear(x, x_scale, weight, weight_scale, bias, fast_accumulation=fast), expected, 5e-3)


def test_no_tokens(device):
    x, scale = quantize_rows(torch.ones(16, 32, device=device))
    assert fp8_linear(x[:0], scale[:0], x, scale).shape == (0, 16)
    assert quantize_tokens(torch.ones(0, 32, device=device))[0].shape == (0, 32)


def test_refuses_odd_sizes(device):
    x, scale = quantize_rows(torch.ones(2, 24, device=device))
    with pytest.raises(ValueError, match=r"multiples of 16, not \(2, 24\)"):
        fp8_linear(x, scale, x, scale)
