"""Linear layers on a GPU, by every way that a table may name, against double precision."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from paceline.kernels.fp8 import quantize_rows
from paceline.kernels.table import GemvConfig, LinearShape, LinearTable, RingConfig

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
RINGS = [RingConfig(64, 64, 1, 3, 4), RingConfig(64, 128, 1, 4, 4, late=True), RingConfig(128, 64, 1, 5, 8)]
SHAPES = [(1, 33, 64), (7, 64, 96), (16, 50, 80), (31, 96, 1008), (33, 130, 272), (64, 40, 4096)]
"""Rows, n, k: k with whole tiles and without, fewer tiles than a ring holds, rows at and below each padding."""


@pytest.fixture
def rng():
    return torch.Generator("cuda").manual_seed(7)


def random(rng, *shape):
    return torch.randn(*shape, generator=rng, device="cuda")


def relative_error(actual, expected):
    assert torch.isfinite(actual.double()).all()
    return ((actual.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", RINGS)
@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_ring_product(rng, rows, n, k, config, dtype):
    from paceline.kernels.triton.ring_linear import ring_linear

    x, weight, bias = random(rng, rows, k).to(dtype), random(rng, n, k).to(dtype), random(rng, n).to(dtype)
    out = torch.full((rows, n), torch.nan, dtype=dtype, device="cuda")
    ring_linear(x, weight, config=config, out=out, pdl=True)
    assert relative_error(out, x.double() @ weight.double().T) < 1e-2
    strided = torch.full((rows, k + 32), torch.nan, dtype=dtype, device="cuda")[:, :k].copy_(x)
    out = ring_linear(strided, weight, bias=bias, config=config)
    assert relative_error(out, x.double() @ weight.double().T + bias.double()) < 1e-2


@pytest.mark.parametrize("splits", [2, 3, 7])
@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_ring_partial_sums(rng, rows, n, k, splits):
    """Some splits have no columns at all; the bias counts once."""
    from paceline.kernels.triton.ring_linear import ring_linear

    x, weight, bias = (random(rng, *shape).bfloat16() for shape in ((rows, k), (n, k), (n,)))
    out = torch.full((splits, rows, n), torch.nan, device="cuda")
    ring_linear(x, weight, bias=bias, config=replace(RINGS[0], splits=splits), out=out, pdl=True)
    assert relative_error(out.sum(0), x.double() @ weight.double().T + bias.double()) < 1e-3


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("config", RINGS)
@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_ring_gated(rng, rows, n, k, config, fp8):
    from paceline.kernels.triton.ring_linear import ring_linear

    x, weight, bias = (random(rng, *shape) for shape in ((rows, k), (2 * n, k), (2 * n,)))
    weight *= k**-0.5
    if fp8:
        (x, x_scale), (weight, weight_scale) = quantize_rows(x), quantize_rows(weight)
        scales = {"x_scale": x_scale, "weight_scale": weight_scale}
        product = (x.double() * x_scale[:, None]) @ (weight.double() * weight_scale[:, None]).T
    else:
        x, weight, scales = x.bfloat16(), weight.bfloat16(), {}
        product = x.double() @ weight.double().T
    gate, up = (product + bias.double()).chunk(2, -1)
    out = torch.full((rows, n), torch.nan, dtype=torch.bfloat16, device="cuda")
    ring_linear(x, weight, bias=bias, **scales, gated=True, config=config, out=out, pdl=True)
    assert relative_error(out, F.silu(gate) * up) < 1e-2


def test_ring_refuses(rng):
    from paceline.kernels.triton.ring_linear import ring_linear

    x, weight = random(rng, 65, 64).bfloat16(), random(rng, 64, 64).bfloat16()
    with pytest.raises(ValueError, match="at most 64 rows, not 65"):
        ring_linear(x, weight, config=RINGS[0])
    with pytest.raises(ValueError, match="cannot split K"):
        ring_linear(x[:4], weight, gated=True, config=replace(RINGS[0], splits=2))


@pytest.mark.parametrize("partial", [0, 1, 3])
@pytest.mark.parametrize("op", ["linear", "gate_up"])
@pytest.mark.parametrize("fp8", [False, True])
def test_norm_of_one_token_in_front(rng, fp8, op, partial):
    """The layer that computes the norm itself gives what the norm and the layer give, and the same residual stream."""
    from paceline.layers.fp8_weight import Fp8Weight
    from paceline.layers.gpu_linear import Choices, DenseGPU, Fp8GPU, Unnormalised

    n, k, eps = 96, 512, 1e-5
    dtype = "w8a16" if fp8 else "bf16"
    plain, fused = (LinearShape(prefix + op, 1, n, k, dtype) for prefix in ("", "norm_"))
    choice = GemvConfig(2, 512, 7, 3, 2)
    table = LinearTable("", {plain: choice, fused: choice})
    residual, gain = random(rng, 1, k).bfloat16(), random(rng, k).bfloat16()
    delta = None if partial == 0 else random(rng, 1, k).bfloat16() if partial == 1 else random(rng, partial, 1, k)
    weight = random(rng, 2 * n if op == "gate_up" else n, k)
    method = Fp8GPU(Choices(table)) if fp8 else DenseGPU(Choices(table))
    weight = Fp8Weight(*quantize_rows(weight)) if fp8 else weight.bfloat16()
    expected_stream = residual.double() if delta is None else residual.double() + delta.double().reshape(-1, k).sum(0)
    wide = expected_stream.bfloat16().double()
    normed = wide * (wide.square().mean() + eps).rsqrt() * gain.double()
    product = normed @ (weight.data.double() * weight.scale.double()[:, None] if fp8 else weight.double()).T
    expected = F.silu(product[:, :n]) * product[:, n:] if op == "gate_up" else product
    x, stream = method.normalise(delta, residual, gain, eps, weight)
    assert isinstance(x, Unnormalised)
    out = method.gated(x, weight, None) if op == "gate_up" else method.apply(x, weight, None)
    assert relative_error(out, expected) < 1e-2
    assert relative_error(stream, expected_stream) < 1e-2
