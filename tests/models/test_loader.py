"""Every parameter from the checkpoint exactly once, every tensor accounted for."""

import json
import logging
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from decoder_steps import whole
from safetensors.torch import load_file, save_file

from paceline.checkpoint.checkpoint import open_checkpoint
from paceline.checkpoint.error import CheckpointError
from paceline.models.loader import load_decoder
from paceline.models.registry import decoder_spec
from paceline.models.weights import parameter_table
from tiny_models import make_tiny

IDS = torch.tensor([5, 90, 17, 200, 33])


def load(folder, **options):
    return load_decoder(open_checkpoint(folder), **{"dtype": torch.float32, "device": "cpu", **options})


def edit(folder, *, drop=(), add=None, **config):
    """Rewrites tensors and config fields of a folder."""
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if name not in drop}
    save_file({**kept, **(add or {})}, folder / "model.safetensors", {"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, **config}))


def logits_of(model):
    with torch.no_grad():
        return model(IDS[None]).logits[0]


def test_tie_flag_and_no_head_ties(tmp_path):
    """Failure 65: the head is the embedding, not random numbers."""
    model = make_tiny(tmp_path, "llama", tied=True)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    torch.testing.assert_close(whole(load(tmp_path), IDS), logits_of(model), rtol=0, atol=1e-4)


def test_tie_flag_and_a_head_skips_the_duplicate(tmp_path, caplog):
    """Failure 65: a checkpoint that also stores the head loads, and the log says what is left unread."""
    model = make_tiny(tmp_path, "llama", tied=True)
    edit(tmp_path, add={"lm_head.weight": torch.full_like(model.lm_head.weight, 7.0)})
    with caplog.at_level(logging.INFO):
        decoder = load(tmp_path)
    assert "lm_head.weight is a duplicate" in caplog.text
    torch.testing.assert_close(whole(decoder, IDS), logits_of(model), rtol=0, atol=1e-4)


def test_no_tie_flag_and_no_head_fails(tmp_path):
    """Failure 65: fail loudly."""
    make_tiny(tmp_path, "llama")
    edit(tmp_path, drop=["lm_head.weight"])
    with pytest.raises(CheckpointError, match=r"lacks lm_head\.weight; set tie_word_embeddings"):
        load(tmp_path)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_each_missing_tensor_is_named(tmp_path, family):
    """Failure 65: after loading, every parameter is accounted for."""
    make_tiny(tmp_path, family, num_hidden_layers=1)
    tensors = load_file(tmp_path / "model.safetensors")
    table = parameter_table(decoder_spec(open_checkpoint(tmp_path).config))
    sources = [name for parameter in table for name, _ in parameter.sources]
    assert sorted(sources) == sorted(tensors), "each tensor is one parameter's source, once"
    for name in tensors:
        save_file({k: v for k, v in tensors.items() if k != name}, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointError, match=f"lacks {name}"):
            load(tmp_path)


def test_unexpected_tensors_are_named(tmp_path):
    make_tiny(tmp_path, "llama")
    edit(tmp_path, add={"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})
    with pytest.raises(CheckpointError, match=r"does not use: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(tmp_path)


def test_frequency_buffers_of_old_checkpoints_are_left_unread(tmp_path):
    model = make_tiny(tmp_path, "llama")
    names = ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"]
    edit(tmp_path, add={name: torch.full((8,), torch.nan) for name in names})
    torch.testing.assert_close(whole(load(tmp_path), IDS), logits_of(model), rtol=0, atol=1e-4)


def test_wrong_shape_is_named(tmp_path):
    make_tiny(tmp_path, "llama")
    edit(tmp_path, intermediate_size=95)
    with pytest.raises(
        CheckpointError, match=r"mlp\.gate_proj\.weight .* has shape \[96, 64\], config\.json says \[95"
    ):
        load(tmp_path)


def test_integer_weights_are_refused(tmp_path):
    model = make_tiny(tmp_path, "llama")
    edit(tmp_path, add={"model.norm.weight": torch.ones_like(model.model.norm.weight).to(torch.int8)})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight .* holds torch\.int8"):
        load(tmp_path)


def test_progress_rises_to_one(tmp_path):
    make_tiny(tmp_path, "qwen3")
    seen = []
    load(tmp_path, progress=lambda what, share: seen.append((what, share)))
    shares = [share for _, share in seen]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert {what for what, _ in seen} == {"loading weights"}


@dataclass
class ConfigOnly:
    """A checkpoint without weights."""

    config: dict[str, Any]
    name: str = "config-only"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dummy_weights_from_the_config_alone(tmp_path, dtype):
    make_tiny(tmp_path, "qwen2", hidden_size=256, intermediate_size=512, head_dim=64)
    config = open_checkpoint(tmp_path).config
    decoder = load_decoder(ConfigOnly(config), dtype=dtype, device="cpu", load_format="dummy")
    expected = sum(math.prod(parameter.shape) for parameter in parameter_table(decoder.spec))
    assert sum(parameter.numel() for parameter in decoder.parameters()) == expected
    logits = whole(decoder, IDS)
    assert logits.isfinite().all()
    assert logits.dtype == torch.float32
    assert logits.std(-1).min() > 0.1, "random, not zero"
    assert len({tuple(row.tolist()) for row in decoder._embedding}) == decoder.spec.vocab_size, "no two rows alike"
    again = load_decoder(ConfigOnly(config), dtype=dtype, device="cpu", load_format="dummy")
    assert torch.equal(whole(again, IDS), logits), "the same each time"
