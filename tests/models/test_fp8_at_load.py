"""Wide checkpoints whose linear layers become FP8 when they are loaded."""

import weakref

import pytest
import torch
from decoder_steps import whole
from gguf import GGMLQuantizationType
from safetensors.torch import load_file

from checkpoint.tiny_gguf import write_gguf
from paceline.checkpoint.checkpoint import open_checkpoint
from paceline.engine.config import EngineConfig
from paceline.layers.fp8_weight import Fp8Weight
from paceline.models.loader import load_decoder
from paceline.runner.cpu import CPURunner
from tiny_models import make_tiny

IDS = torch.tensor([5, 90, 17, 200, 33])
NAMES = ("qkv", "o", "gate_up", "down")
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def load(checkpoint, **options):
    return load_decoder(checkpoint, **{"dtype": torch.float32, "device": "cpu", "quantization": "fp8", **options})


def weights(decoder):
    """(layer, name, weight) of each linear layer but the head."""
    return [(i, name, getattr(layer, name).weight) for i, layer in enumerate(decoder._layers) for name in NAMES]


def fused(tensors, layer, name):
    modules = {
        "qkv": [f"self_attn.{part}_proj" for part in "qkv"],
        "o": ["self_attn.o_proj"],
        "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
        "down": ["mlp.down_proj"],
    }
    return torch.cat([tensors[f"model.layers.{layer}.{module}.weight"] for module in modules[name]])


def check_rounded(weight, wide):
    """Each number is off by a sixteenth at most, or by half the smallest one of its row."""
    error = (weight.wide(torch.float32).cpu() - wide).abs()
    smallest = wide.abs().amax(1, keepdim=True) / 448 * 2**-9
    assert (error <= wide.abs() / 16 * 1.001 + smallest / 2 * 1.001).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_linear_layers_become_fp8_and_nothing_else(tmp_path, family, device):
    make_tiny(tmp_path, family)
    decoder = load(open_checkpoint(tmp_path), device=device)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer, name, weight in weights(decoder):
        assert isinstance(weight, Fp8Weight)
        check_rounded(weight, fused(tensors, layer, name))
    kept = [tensor for tensor in decoder.parameters() if tensor.dtype != torch.float8_e4m3fn]
    assert all(tensor.dtype == torch.float32 for tensor in kept)
    assert torch.equal(decoder._embedding.cpu(), tensors["model.embed_tokens.weight"])
    assert torch.equal(decoder._norm.cpu(), tensors["model.norm.weight"])
    assert not isinstance(decoder._head.weight, Fp8Weight)


def test_logits_are_near_the_wide_ones(tmp_path):
    model = make_tiny(tmp_path, "llama")
    with torch.no_grad():
        expected = model(IDS[None]).logits[0]
    error = (whole(load(open_checkpoint(tmp_path)), IDS) - expected).norm() / expected.norm()
    assert 0.01 < error < 0.2


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_gguf(tmp_path, kind):
    model = make_tiny(tmp_path, "llama")
    write_gguf(tmp_path / "tiny.gguf", model, "llama", kind=GGMLQuantizationType[kind])
    checkpoint = open_checkpoint(tmp_path / "tiny.gguf")
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.tensor_names()}
    for layer, name, weight in weights(load(checkpoint)):
        check_rounded(weight, fused(tensors, layer, name))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stated", [False, True], ids=["asked for", "stated by the config"])
def test_dummy(tmp_path, stated, device):
    make_tiny(tmp_path, "qwen3")
    checkpoint = open_checkpoint(tmp_path)
    if stated:
        checkpoint.config["quantization_config"] = {"quant_method": "fp8"}
    options = {"load_format": "dummy", "quantization": "auto" if stated else "fp8", "dtype": torch.bfloat16}
    decoder = load(checkpoint, **options, device=device)
    assert all(isinstance(weight, Fp8Weight) for _, _, weight in weights(decoder))
    checkpoint.config["quantization_config"] = None
    wide = load_decoder(checkpoint, dtype=torch.bfloat16, device=device, load_format="dummy")
    assert torch.equal(decoder._embedding, wide._embedding), "the same numbers, quantised or not"
    for (_, _, weight), (_, _, same) in zip(weights(decoder), weights(wide), strict=True):
        check_rounded(weight, same.to_dense().cpu().float())


class Watched:
    """A checkpoint that knows which of the matrices that it gave are still in use."""

    def __init__(self, checkpoint):
        self.checkpoint, self.given, self.most = checkpoint, [], 0
        self.name, self.config = checkpoint.name, checkpoint.config

    def tensor_names(self):
        return self.checkpoint.tensor_names()

    def tensor(self, name):
        tensor = self.checkpoint.tensor(name).clone()
        if name.endswith("proj.weight"):
            self.given.append(weakref.ref(tensor))
            self.most = max(self.most, sum(given() is not None for given in self.given))
        return tensor


def test_one_wide_weight_at_a_time(tmp_path):
    make_tiny(tmp_path, "llama")
    watched = Watched(open_checkpoint(tmp_path))
    load(watched)
    assert watched.given
    assert watched.most == 1


@pytest.mark.parametrize("quantization", ["auto", "fp8"])
def test_the_runner_passes_the_option_on(tmp_path, quantization):
    make_tiny(tmp_path, "llama")
    config = EngineConfig(model=str(tmp_path), device="cpu", quantization=quantization, kv_cache_bytes=1 << 20)
    runner = CPURunner(config, open_checkpoint(tmp_path))
    assert {isinstance(weight, Fp8Weight) for *_, weight in weights(runner._decoder)} == {quantization == "fp8"}
    runner.close()
