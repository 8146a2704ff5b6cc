"""FP8 checkpoints of every form, read as they are."""

import json
import logging

import pytest
import torch
from decoder_steps import whole
from safetensors.torch import load_file, save_file
from tiny_fp8 import (
    KV_NAMES,
    SCALES,
    a_column,
    compressed_tensors,
    one_number,
    plain_fp8,
    quantise_folder,
    quantise_inputs,
    rewrite,
)

from paceline.checkpoint.checkpoint import open_checkpoint
from paceline.checkpoint.error import CheckpointError
from paceline.layers.fp8_weight import Fp8Weight
from paceline.models.loader import load_decoder
from tiny_models import make_tiny

CLOSE = 0.02
"""Room for a token that rounds to the other neighbour; tokens that are not quantised are off by 0.4 and more."""
IDS = torch.tensor([5, 90, 17, 200, 33, 41, 7])
FUSED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


def load(folder, **options):
    return load_decoder(open_checkpoint(folder), **{"dtype": torch.float32, "device": "cpu", **options})


def linears(decoder):
    """(layer, name, linear) of each layer."""
    return [(i, name, getattr(layer, name)) for i, layer in enumerate(decoder._layers) for name in FUSED]


def check_weights(decoder, meant):
    """The decoder's FP8 weights are the dequantised ones, to the bit."""
    for index, name, linear in linears(decoder):
        expected = torch.cat([meant[f"model.layers.{index}.{module}.weight"] for module in FUSED[name]])
        assert isinstance(linear.weight, Fp8Weight)
        assert linear.weight.data.dtype == torch.float8_e4m3fn
        assert linear.weight.scale.shape == (len(expected),)
        assert torch.equal(linear.weight.wide(torch.float32), expected), f"layer {index} {name}"


def expected_logits(model, meant, modules):
    """transformers with the dequantised weights, whose layers ``modules`` quantise their tokens."""
    model.load_state_dict(meant, strict=False)
    model.tie_weights()
    quantise_inputs(model, modules)
    with torch.no_grad():
        return model(IDS[None]).logits[0]


def modules_of(model, ignored=("lm_head",)):
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and not any(part in name for part in ignored)
    ]


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("method", ["compressed-tensors", "fp8"])
def test_both_formats_with_scales_of_every_shape(tmp_path, method, scales, static):
    """Failure 74: each part of a fused weight keeps its own scale. Static scales of tokens are accounted for."""
    model = make_tiny(tmp_path, "llama")
    scheme = "channel" if scales.startswith("channel") else "tensor"
    config = compressed_tensors(scheme, static=static) if method == "compressed-tensors" else plain_fp8(static=static)
    meant = quantise_folder(tmp_path, config, SCALES[scales], static=static)
    decoder = load(tmp_path)
    check_weights(decoder, meant)
    logits = expected_logits(model, meant, modules_of(model))
    torch.testing.assert_close(whole(decoder, IDS), logits, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_every_family(tmp_path, family, tied):
    model = make_tiny(tmp_path, family, tied=tied)
    meant = quantise_folder(tmp_path, compressed_tensors(), a_column)
    decoder = load(tmp_path)
    check_weights(decoder, meant)
    logits = expected_logits(model, meant, modules_of(model))
    torch.testing.assert_close(whole(decoder, IDS), logits, rtol=0, atol=CLOSE)


def test_names_that_transformers_gives_the_scales(tmp_path):
    make_tiny(tmp_path, "llama")
    names = {"scale_name": "weight_scale_inv", "input_scale_name": "activation_scale"}
    config = {**plain_fp8(static=True), "weight_block_size": None}
    meant = quantise_folder(tmp_path, config, one_number, static=True, **names)
    check_weights(load(tmp_path), meant)


def test_shards(tmp_path):
    make_tiny(tmp_path, "llama", shards=1)
    meant = quantise_folder(tmp_path, compressed_tensors(), a_column)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    files = {name: f"model-0000{1 + name.endswith('scale')}-of-00002.safetensors" for name in tensors}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, tmp_path / file, {"format": "pt"})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    check_weights(load(tmp_path), meant)


def test_ignored_layers_stay_wide(tmp_path):
    """Failure 74: the list names the parts of a fused layer."""
    model = make_tiny(tmp_path, "llama")
    ignored = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
    meant = quantise_folder(tmp_path, compressed_tensors(), a_column, ignored=["lm_head", *ignored])
    decoder = load(tmp_path)
    narrow = {(index, name) for index, name, linear in linears(decoder) if isinstance(linear.weight, Fp8Weight)}
    assert narrow == {(index, name) for index, name, _ in linears(decoder)} - {(0, "qkv")}
    logits = expected_logits(model, meant, modules_of(model, ("lm_head", *ignored)))
    torch.testing.assert_close(whole(decoder, IDS), logits, rtol=0, atol=CLOSE)


def test_one_ignored_part_makes_the_fused_layer_wide(tmp_path):
    """Failure 74: the other parts are dequantised, none is taken for something that it is not."""
    model = make_tiny(tmp_path, "llama")
    ignored = [".*k_proj", ".*up_proj"]
    meant = quantise_folder(tmp_path, plain_fp8(), one_number, ignored=["lm_head", *ignored])
    decoder = load(tmp_path)
    narrow = {name for _, name, linear in linears(decoder) if isinstance(linear.weight, Fp8Weight)}
    assert narrow == {"o", "down"}
    logits = expected_logits(
        model, meant, [name for name in modules_of(model) if name.endswith(("o_proj", "down_proj"))]
    )
    torch.testing.assert_close(whole(decoder, IDS), logits, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_head_in_fp8(tmp_path, tied):
    """It is dequantised; where it is a duplicate of the embedding, it is left unread with its scale."""
    model = make_tiny(tmp_path, "llama", tied=tied)
    if tied:
        rewrite(tmp_path, {"lm_head.weight": torch.full_like(model.lm_head.weight, 7.0)})
    meant = quantise_folder(tmp_path, compressed_tensors(), a_column, ignored=[])
    if tied:
        del meant["lm_head.weight"]
    logits = expected_logits(model, meant, modules_of(model))
    torch.testing.assert_close(whole(load(tmp_path), IDS), logits, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("names", KV_NAMES)
def test_kv_scales_do_not_matter_to_a_wide_cache(tmp_path, caplog, names):
    """Failure 73: under each name they are accounted for."""
    make_tiny(tmp_path, "llama")
    add = {f"model.layers.{layer}.{name}": torch.tensor(0.05) for layer in range(2) for name in KV_NAMES[names]}
    meant = quantise_folder(tmp_path, compressed_tensors(), a_column, add=add)
    with caplog.at_level(logging.WARNING):
        check_weights(load(tmp_path), meant)
    assert caplog.records == []


NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({f"{NAME}_scale": None}, rf"{NAME} .* holds FP8 without its scale {NAME}_scale"),
        ({NAME: None}, f"lacks {NAME}"),
        ({NAME: torch.ones(96, 64)}, rf"{NAME} .* holds torch\.float32 but has a scale"),
        ({NAME: torch.ones(96, 64).to(torch.float8_e5m2)}, rf"{NAME} .* holds torch\.float8_e5m2 but has a scale"),
        ({f"{NAME}_scale": torch.ones(1, 1, 96)}, rf"{NAME}_scale .* has shape \[1, 1, 96\] .* blocks are not"),
        ({f"{NAME}_scale": torch.ones(96, 2)}, r"has shape \[96, 2\] for a weight \[96, 64\]"),
        ({f"{NAME}_scale": torch.ones(64)}, r"has shape \[64\] for a weight \[96, 64\]"),
        ({f"{NAME}_scale": torch.tensor(torch.nan)}, "negative or not finite"),
        ({f"{NAME}_scale": torch.full((96,), -1.0)}, "negative or not finite"),
        (
            {f"{NAME}_scale": torch.ones(96, dtype=torch.int32)},
            r"holds \[96\] of torch\.int32, which is not supported",
        ),
        ({f"{NAME}_scale_inv": torch.ones(96)}, rf"does not use: {NAME}_scale$"),
        ({f"{NAME}_zero_point": torch.ones(96)}, rf"does not use: {NAME}_zero_point"),
        ({"model.layers.0.mlp.k_scale": torch.ones(1)}, r"does not use: model\.layers\.0\.mlp\.k_scale"),
        ({"model.layers.2.self_attn.k_scale": torch.ones(1)}, r"does not use: model\.layers\.2\.self_attn\.k_scale"),
        ({"model.norm.weight_scale": torch.ones(1)}, r"does not use: model\.norm\.weight_scale"),
    ],
)
def test_each_scale_has_its_place(tmp_path, tensors, message):
    """Failure 74: a slot that nothing fills, or a scale that nothing takes, is an error with its name."""
    make_tiny(tmp_path, "llama")
    quantise_folder(tmp_path, compressed_tensors(), a_column)
    rewrite(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_fp8_weights_in_a_checkpoint_that_does_not_say_so(tmp_path):
    """Without scales they would be taken for small numbers."""
    make_tiny(tmp_path, "llama")
    quantise_folder(tmp_path, compressed_tensors(), a_column)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "quantization_config": None}))
    with pytest.raises(CheckpointError, match=r"does not use: .*weight_scale"):
        load(tmp_path)
    rewrite(tmp_path, {name: None for name in load_file(tmp_path / "model.safetensors") if name.endswith("_scale")})
    with pytest.raises(CheckpointError, match="holds FP8 without its scale"):
        load(tmp_path)


def test_quantising_what_is_fp8_changes_nothing(tmp_path):
    make_tiny(tmp_path, "llama")
    meant = quantise_folder(tmp_path, plain_fp8(), one_number)
    check_weights(load(tmp_path, quantization="fp8"), meant)


def test_quantising_a_partly_fp8_checkpoint_quantises_the_rest(tmp_path):
    make_tiny(tmp_path, "llama")
    meant = quantise_folder(tmp_path, plain_fp8(), one_number, ignored=["lm_head", ".*k_proj"])
    decoder = load(tmp_path, quantization="fp8")
    assert all(isinstance(linear.weight, Fp8Weight) for _, _, linear in linears(decoder))
    qkv = decoder._layers[0].qkv.weight.wide(torch.float32)
    query, key, value = (meant[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qkv")
    assert torch.equal(qkv[:64], query)
    assert torch.equal(qkv[96:], value)
    assert ((qkv[64:96] - key).abs() <= key.abs() / 16 + key.abs().max() / 448 / 512).all()
