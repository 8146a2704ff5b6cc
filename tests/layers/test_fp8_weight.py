"""FP8 weights, on the CPU and on a GPU where there is one."""

import pytest
import torch

from paceline.layers.fp8_weight import Fp8Weight

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5, 16), (64, 1000), (3, 14336)])
def test_each_number_is_off_by_a_sixteenth_at_most(device, dtype, shape):
    """Half a unit of three bits; numbers too small for that, by half the smallest one."""
    torch.manual_seed(0)
    wide = (torch.randn(shape, device=device) * torch.logspace(-3, 3, shape[0], device=device)[:, None]).to(dtype)
    weight = Fp8Weight.of(wide)
    assert weight.data.dtype == torch.float8_e4m3fn
    largest = wide.double().abs().amax(1)
    torch.testing.assert_close(weight.scale.double(), largest / 448, rtol=1e-6, atol=0)
    error = (weight.wide(torch.float32).double() - wide.double()).abs()
    assert (error <= wide.double().abs() / 16 * 1.001 + largest[:, None] / 448 * 2**-10 * 1.001).all()
    assert weight.wide(dtype).dtype == dtype


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_of_zeros_stays_one(device):
    weight = Fp8Weight.of(torch.tensor([[0.0] * 16, [1.0] * 16], device=device))
    assert weight.wide(torch.float32).tolist() == [[0.0] * 16, [1.0] * 16]


@pytest.mark.parametrize("device", DEVICES)
def test_joined(device):
    parts = [Fp8Weight.of(torch.randn(rows, 16, device=device)) for rows in (3, 1, 4)]
    joined = Fp8Weight.joined(parts)
    assert torch.equal(joined.wide(torch.float32), torch.cat([part.wide(torch.float32) for part in parts]))
    assert Fp8Weight.joined(parts[:1]) is parts[0]
