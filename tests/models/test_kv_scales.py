"""Scales of an FP8 KV cache, with a cache on the CPU that rounds what is written to FP8."""

import logging
from dataclasses import replace

import pytest
import torch
from decoder_steps import Steps
from safetensors.torch import load_file
from tiny_fp8 import KV_NAMES, a_column, compressed_tensors, quantise_folder, rewrite

from paceline.checkpoint.checkpoint import open_checkpoint
from paceline.checkpoint.error import CheckpointError
from paceline.layers.gather_attention import GatherAttention
from paceline.layers.kv_cache import KVCache
from paceline.models.loader import load_decoder
from tiny_models import make_tiny

IDS = torch.tensor([5, 90, 17, 200, 33, 41, 7])
FAMILIES = ["llama", "qwen2", "qwen3"]  # without biases, with biases, with norms of queries and keys


class Rounded(KVCache):
    def write(self, layer, slots, key_value):
        super().write(layer, slots, key_value.clamp(-448, 448).to(torch.float8_e4m3fn).float())


@pytest.fixture
def on_cpu(monkeypatch):
    """Gives the attention of a CPU a cache in float32; returns a function that chooses its class."""

    def choose(cache_class):
        def make_cache(self, layout, num_blocks, device):
            return cache_class(replace(layout, dtype=torch.float32), num_blocks, device)

        monkeypatch.setattr(GatherAttention, "serves", staticmethod(lambda *_: True))
        monkeypatch.setattr(GatherAttention, "make_cache", make_cache)

    return choose


def run(folder, kv_dtype=torch.float8_e4m3fn):
    """Logits, and the cache."""
    steps = Steps(load_decoder(open_checkpoint(folder), dtype=torch.float32, device="cpu", kv_dtype=kv_dtype), [7])
    return steps.step([IDS])[0], steps.cache


def make(folder, family, names=KV_NAMES["compressed-tensors"], *, key=0.05, value=0.003, shape=(1,)):
    """An FP8 checkpoint with these scales in each of its two layers."""
    make_tiny(folder, family)
    add = {}
    for layer in range(2):
        for name in names:
            number = value if "v_" in name.split(".")[-1] or "v_proj" in name else key
            add[f"model.layers.{layer}.{name}"] = torch.full(shape, number)
    return quantise_folder(folder, compressed_tensors(), a_column, add=add)


@pytest.mark.parametrize("names", KV_NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_scales_under_each_name(tmp_path, on_cpu, family, names):
    """Failure 73: the cache holds keys and values over their scales, and the result is the same."""
    make(tmp_path, family, KV_NAMES[names], value=0.05 if names == "one for both" else 0.003)
    on_cpu(KVCache)
    expected, plain = run(tmp_path, kv_dtype=torch.float32)
    logits, cache = run(tmp_path)
    key, value = 1 / 16, 1 / 16 if names == "one for both" else 1 / 256  # rounded up to powers of two
    for layer in range(2):
        torch.testing.assert_close(cache.keys(layer) * key, plain.keys(layer))
        torch.testing.assert_close(cache.values(layer) * value, plain.values(layer))
    torch.testing.assert_close(logits, expected)


def test_scales_of_heads(tmp_path, on_cpu):
    """One for each head: the largest serves all."""
    make(tmp_path, "llama", key=0.05, shape=(2,))
    on_cpu(KVCache)
    assert torch.equal(run(tmp_path)[1].keys(1), run(tmp_path, torch.float32)[1].keys(1) * 16)


def enlarge(folder, factor):
    """Makes keys and values so much larger, and what reads them smaller by as much."""
    tensors = load_file(folder / "model.safetensors")
    norms = any(name.endswith("k_norm.weight") for name in tensors)
    large, small = ("v_proj", "k_norm" if norms else "k_proj"), ("o_proj", "q_norm" if norms else "q_proj")
    changed = {}
    for name, tensor in tensors.items():
        _, module, kind = ("." + name).rsplit(".", 2)
        if kind == "weight_scale" or kind == "bias" or "norm" in module:
            changed[name] = tensor * factor if module in large else tensor / factor if module in small else tensor
    rewrite(folder, changed)


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_and_values_beyond_the_range_of_fp8(tmp_path, on_cpu, family, caplog):
    """Failure 73: with scale 1 they are cut off, which is said."""
    logits = {}
    for name in ("with", "without"):
        make(tmp_path / name, family, KV_NAMES["compressed-tensors"] if name == "with" else (), key=100.0, value=100.0)
        enlarge(tmp_path / name, 512)
        on_cpu(Rounded)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            logits[name], cache = run(tmp_path / name)
        assert ("has no scales for an FP8 KV cache, which works with scale 1" in caplog.text) == (name == "without")
        assert (cache.data[0].abs().max() == 448) == (name == "without")
    on_cpu(KVCache)
    expected = run(tmp_path / "without", torch.float32)[0]
    errors = {name: (found - expected).norm() / expected.norm() for name, found in logits.items()}
    assert errors["with"] < 0.15
    assert errors["without"] > 0.5


@pytest.mark.parametrize(
    "stored", [torch.zeros(1), torch.tensor(torch.inf), torch.zeros(0), torch.ones(1, dtype=torch.int8)]
)
def test_scales_that_cannot_be(tmp_path, on_cpu, stored):
    make(tmp_path, "llama", ())
    rewrite(tmp_path, {"model.layers.1.self_attn.k_scale": stored})
    on_cpu(KVCache)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.self_attn\.k_scale in .* holds"):
        run(tmp_path)
