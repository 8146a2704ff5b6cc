import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.checkpoint.checkpoint import open_checkpoint
from paceline.checkpoint.error import CheckpointError
from tiny_models import EOS_ID, IM_END_ID, make_tiny


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_every_tensor_comes_back(tmp_path: Path, shards: int, tied: bool) -> None:
    """Tied heads leave no ``lm_head.weight`` on disk; the flag says so. failure 65 (checkpoint half)"""
    model = make_tiny(tmp_path, "qwen2", tied=tied, shards=shards)
    checkpoint = open_checkpoint(tmp_path)
    expected = dict(model.state_dict())
    if tied:
        del expected["lm_head.weight"]
    assert set(checkpoint.tensor_names()) == set(expected)
    assert len(checkpoint.tensor_names()) == len(expected)
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.tensor(name), tensor)
    assert checkpoint.config["tie_word_embeddings"] is tied
    with pytest.raises(CheckpointError, match="no tensor nothing"):
        checkpoint.tensor("nothing")


def test_both_head_and_embedding_of_a_tied_checkpoint_are_listed(tmp_path: Path) -> None:
    """failure 65 (checkpoint half): the loader sees both and can skip the duplicate."""
    make_tiny(tmp_path, "llama", tied=True)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, tmp_path / "model.safetensors"
    )
    names = open_checkpoint(tmp_path).tensor_names()
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(names)


def test_missing_shard(tmp_path: Path) -> None:
    """failure 67: shard 2 of 3 is deleted; all that is missing is listed."""
    make_tiny(tmp_path, "llama", shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path).tensor_names()
    assert "model-00002-of-00003.safetensors is missing" in str(caught.value)
    assert "model-00003-of-00003.safetensors is missing" in str(caught.value)


@pytest.mark.parametrize("kept", [0, 4, 100, 0.5])
@pytest.mark.parametrize("shards", [1, 3])
def test_truncated_file(tmp_path: Path, shards: int, kept: float) -> None:
    """failure 67: a download that broke off."""
    make_tiny(tmp_path, "llama", shards=shards)
    shard = sorted(tmp_path.glob("*.safetensors"))[-1]
    content = shard.read_bytes()
    shard.write_bytes(content[: int(kept * len(content)) if kept == 0.5 else int(kept)])
    with pytest.raises(CheckpointError, match=f"{shard.name} is truncated or not a safetensors file"):
        open_checkpoint(tmp_path).tensor_names()


def test_pointer_instead_of_weights(tmp_path: Path) -> None:
    make_tiny(tmp_path, "llama")
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(CheckpointError, match="truncated or not a safetensors file"):
        open_checkpoint(tmp_path).tensor_names()


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": None}, {"weight_map": []}])
def test_empty_index(tmp_path: Path, index: dict[str, object]) -> None:
    """failure 67: an empty weight_map is an error even where weight files lie beside it."""
    make_tiny(tmp_path, "llama")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="weight_map is missing or empty"):
        open_checkpoint(tmp_path).tensor_names()


def test_index_names_a_tensor_that_its_file_lacks(tmp_path: Path) -> None:
    """failure 67"""
    make_tiny(tmp_path, "llama", shards=2)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.layers.9.mlp.up_proj.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"00001-of-00002\.safetensors lacks model\.layers\.9\.mlp\.up_proj"):
        open_checkpoint(tmp_path).tensor_names()


def test_no_weights_at_all(tmp_path: Path) -> None:
    make_tiny(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    assert open_checkpoint(tmp_path).config["model_type"] == "llama"  # enough for random weights
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        open_checkpoint(tmp_path).tensor_names()
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match="Only safetensors"):
        open_checkpoint(tmp_path).tensor_names()


@pytest.mark.parametrize(
    "stranger", ["model.safetensors", "consolidated.safetensors", "model-00003-of-00002.safetensors"]
)
def test_only_what_the_index_assigns_is_loaded(tmp_path: Path, stranger: str) -> None:
    """failure 68: other files, and other tensors within a shard, hold the same names with other values."""
    model = make_tiny(tmp_path, "llama", shards=2)
    expected = model.state_dict()
    save_file({name: torch.full_like(tensor, 7.0) for name, tensor in expected.items()}, tmp_path / stranger)
    weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    second = tmp_path / "model-00002-of-00002.safetensors"
    elsewhere = {name: torch.full_like(expected[name], 8.0) for name, file in weight_map.items() if file != second.name}
    save_file({**load_file(second), **elsewhere, "unlisted": torch.zeros(1)}, second)
    checkpoint = open_checkpoint(tmp_path)
    assert sorted(checkpoint.tensor_names()) == sorted(expected)
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.tensor(name), tensor)


def test_index_cannot_point_outside_the_folder(tmp_path: Path) -> None:
    make_tiny(tmp_path / "model", "llama", shards=2)
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    with pytest.raises(CheckpointError, match="must name a file of this folder"):
        open_checkpoint(tmp_path / "model").tensor_names()


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.float32"}, "float32"),
        ({"torch_dtype": None}, None),
        ({}, None),
        ({"dtype": "float64"}, None),
        ({"dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}, "bfloat16"),
        ({"torch_dtype": "float16", "quantization_config": {"quant_method": "fp8"}}, "float16"),
        ({"quantization_config": {"quant_method": "fp8"}}, None),
    ],
)
def test_dtype(tmp_path: Path, config: dict[str, object], dtype: str | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(tmp_path).dtype == dtype


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_broken_config(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(tmp_path)


def test_other_quantisations_are_refused_at_once(tmp_path: Path) -> None:
    """failure 71: GPTQ with activation order; nothing of it is read, so nothing of it can be read wrong."""
    stated = {"quant_method": "gptq", "bits": 4, "desc_act": True, "group_size": 128}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": stated}))
    with pytest.raises(CheckpointError, match=r"quant_method='gptq' is not supported; .* FP8 \(float8_e4m3fn\)"):
        open_checkpoint(tmp_path)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
@pytest.mark.parametrize("shards", [1, 2])
def test_tensors_are_the_mapped_file(tmp_path: Path, shards: int) -> None:
    """Nothing is copied on the host on the way to a GPU."""
    make_tiny(tmp_path, "llama", shards=shards)
    checkpoint = open_checkpoint(tmp_path)
    tensors = [checkpoint.tensor(name) for name in checkpoint.tensor_names()]
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    ranges = [[int(address, 16) for address in line[0].split("-")] for line in lines]
    assert len({line[-1] for line in lines}) == shards
    assert all(any(start <= tensor.data_ptr() < end for start, end in ranges) for tensor in tensors)


def test_everything_that_make_tiny_writes(tmp_path: Path) -> None:
    make_tiny(tmp_path / "tiny", "qwen3")
    checkpoint = open_checkpoint(tmp_path / "tiny")
    assert checkpoint.name == "tiny"
    assert checkpoint.dtype == "float32"
    assert checkpoint.generation.eos_ids == (IM_END_ID, EOS_ID)
    template = checkpoint.chat_template()
    assert template is not None
    assert template.render([{"role": "user", "content": "hello"}]) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert checkpoint.tokenizer().bos_token == "<bos>"
