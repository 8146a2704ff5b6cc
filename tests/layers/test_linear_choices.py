"""Which kernel of a GPU a linear layer takes: what the table says, and the library where it says nothing."""

import pytest
import torch

from paceline.kernels.table import Choice, Cublas, GemvConfig, LinearShape, LinearTable, RingConfig, SkinnyConfig
from paceline.layers.fp8_weight import Fp8Weight

N, K = 32, 16
GEMV, SKINNY, RING = GemvConfig(1, 16, 1, 1, 1), SkinnyConfig(16, 16, 1, 1, 1), RingConfig(64, 64, 1, 2, 4)


@pytest.fixture
def used(monkeypatch):
    """Names of what was called, with the choice; the kernels themselves need a GPU."""
    gpu_linear = pytest.importorskip("paceline.layers.gpu_linear")
    names = []

    def product(name):
        def call(x, weight, **options):
            names.append(name)
            assert options["config"] is {"gemv": GEMV, "skinny": SKINNY, "ring": RING}[name]
            return x.new_zeros(len(x), len(weight) // (2 if options["gated"] else 1), dtype=torch.bfloat16)

        return call

    for name, function in (("gemv", "gemv"), ("skinny", "skinny_linear"), ("ring", "ring_linear")):
        monkeypatch.setattr(gpu_linear, function, product(name))

    def quantised(name):
        def call(*tensors, **_):
            names.append(name)
            x = tensors[0] if name == "quantise" else tensors[1]
            return x.to(torch.float8_e4m3fn), torch.ones(len(x))

        return call

    monkeypatch.setattr(gpu_linear, "quantize_tokens", quantised("quantise"))
    monkeypatch.setattr(gpu_linear, "add_rms_norm_fp8", quantised("quantising norm"))
    monkeypatch.setattr(gpu_linear, "add_rms_norm", lambda delta, residual, *_, **__: names.append("norm") or residual)
    monkeypatch.setattr(
        gpu_linear, "fp8_linear", lambda x, *_: names.append("library") or x.new_zeros(len(x), N, dtype=torch.bfloat16)
    )
    monkeypatch.setattr(gpu_linear, "silu_mul_fp8", lambda both, **_: names.append("silu") or both)
    monkeypatch.setattr(gpu_linear, "silu_mul", lambda both, **_: names.append("silu") or both)
    return names


def layer(kind: str, choices: dict[tuple[str, int, str], Choice]):
    """A method whose table has choices by operation, rows and dtype."""
    from paceline.layers.gpu_linear import Choices, DenseGPU, Fp8GPU

    widths = {"linear": N, "gate_up": N // 2}
    table = LinearTable(
        "", {LinearShape(op, rows, widths[op.removeprefix("norm_")], K, dtype): choice
             for (op, rows, dtype), choice in choices.items()}
    )  # fmt: skip
    return (Fp8GPU if kind == "fp8" else DenseGPU)(Choices(table))


def run(method, rows: int, *, gated: bool = False, dtype: torch.dtype = torch.bfloat16):
    residual = torch.zeros(rows, K, dtype=dtype)
    weight = torch.zeros(N, K, dtype=dtype)
    if method.name == "fp8-gpu":
        weight = Fp8Weight(weight.to(torch.float8_e4m3fn), torch.ones(N))
    x, stream = method.normalise(torch.zeros_like(residual), residual, torch.ones(K, dtype=dtype), 1e-5, weight)
    assert stream.shape == residual.shape
    return method.gated(x, weight, None) if gated else method.apply(x, weight, None)


@pytest.mark.parametrize("gated", [False, True])
def test_table_decides_for_bfloat16(used, gated):
    op = "gate_up" if gated else "linear"
    choices = {(op, 1, "bf16"): GEMV, (op, 8, "bf16"): RING, (op, 16, "bf16"): SKINNY, (op, 64, "bf16"): Cublas()}
    method = layer("dense", choices)
    library = ["norm", "silu"] if gated else ["norm"]
    for rows, expected in ((1, "gemv"), (2, "ring"), (8, "ring"), (9, "skinny"), (17, None), (65, None)):
        used.clear()
        assert run(method, rows, gated=gated).shape[0] == rows
        assert used == (library if expected is None else ["norm", expected])


def test_other_dtypes_are_left_to_the_library(used):
    method = layer("dense", {("linear", 64, "bf16"): SKINNY, ("norm_linear", 1, "bf16"): GEMV})
    for rows in (1, 8):
        run(method, rows, dtype=torch.float32)
    assert used == ["norm", "norm"]


@pytest.mark.parametrize(("kind", "dtype"), [("dense", "bf16"), ("fp8", "w8a16")])
@pytest.mark.parametrize("gated", [False, True])
def test_norm_of_one_token_is_fused_where_the_table_says_so(used, kind, dtype, gated):
    op = "gate_up" if gated else "linear"
    method = layer(kind, {(op, 1, dtype): GEMV, (f"norm_{op}", 1, dtype): GEMV})
    run(method, 1, gated=gated)
    assert used == ["gemv"]
    used.clear()
    run(layer(kind, {(op, 1, dtype): GEMV}), 1, gated=gated)
    assert used == ["norm", "gemv"]


@pytest.mark.parametrize("gated", [False, True])
def test_fp8_quantises_all_but_single_tokens(used, gated):
    op = "gate_up" if gated else "linear"
    method = layer("fp8", {(op, 1, "w8a16"): GEMV, (op, 8, "w8a8"): RING})
    library = ["quantising norm", "library", *(["silu"] if gated else [])]
    for rows, expected in ((1, ["norm", "gemv"]), (8, ["quantising norm", "ring"]), (9, library), (65, library)):
        used.clear()
        run(method, rows, gated=gated)
        assert used == expected
    used.clear()
    run(layer("fp8", {(op, 8, "w8a8"): RING}), 1, gated=gated)
    assert used == ["norm", "quantise", "ring"]
