from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from tiny_gguf import gguf_name, stored_tensors, write_gguf
from transformers import LlamaConfig
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from paceline.checkpoint.checkpoint import open_checkpoint
from paceline.checkpoint.error import CheckpointError
from paceline.checkpoint.gguf import GGUFCheckpoint
from tiny_models import tiny_model


def test_smollm2_weights_equal_those_of_transformers(smollm2: GGUFCheckpoint) -> None:
    processor = LlamaTensorProcessor({"num_attention_heads": 9, "num_key_value_heads": 3})
    for layer, projection in ((0, "q_proj"), (0, "k_proj"), (29, "q_proj"), (29, "k_proj"), (7, "v_proj")):
        name = f"model.layers.{layer}.self_attn.{projection}.weight"
        tensor = smollm2._tensors[gguf_name(name)]
        expected = processor.process(dequantize(tensor.data, tensor.tensor_type), tensor.name).weights
        assert torch.equal(smollm2.tensor(name), torch.from_numpy(expected)), name


def test_smollm2_config(smollm2: GGUFCheckpoint) -> None:
    """As published with the model: HuggingFaceTB/SmolLM2-135M-Instruct, config.json."""
    published = {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "hidden_act": "silu",
        "bos_token_id": 1,
    }
    assert {key: smollm2.config[key] for key in published} == published
    assert smollm2.generation.eos_ids == (2,)
    assert smollm2.generation.sampling == {}
    assert smollm2.dtype is None
    assert len(smollm2.tensor_names()) == 30 * 9 + 2


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_tensor_comes_back(tmp_path: Path, family: Any, tied: bool) -> None:
    """failure 65 (checkpoint half): the head counts as tied exactly when the file has none."""
    bias = {"attention_bias": True} if family == "llama" else {}
    model = tiny_model(family, tied=tied, head_dim=32, **bias)
    architecture = "llama" if family == "mistral" else family
    write_gguf(tmp_path / "tiny.gguf", model, architecture)
    checkpoint = open_checkpoint(tmp_path / "tiny.gguf")
    expected = stored_tensors(model)
    assert set(checkpoint.tensor_names()) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.tensor(name), tensor), name
    assert checkpoint.config["tie_word_embeddings"] is tied
    assert checkpoint.config["head_dim"] == 32
    assert checkpoint.config["num_key_value_heads"] == 2
    assert checkpoint.config["attention_bias"] is (family in ("llama", "qwen2"))
    assert checkpoint.config["vocab_size"] == model.config.vocab_size
    assert checkpoint.dtype == "float32"
    assert checkpoint.name == "tiny"
    with pytest.raises(CheckpointError, match="no tensor nothing"):
        checkpoint.tensor("nothing")


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (GGMLQuantizationType.F16, "float16"),
        (GGMLQuantizationType.BF16, "bfloat16"),
        (GGMLQuantizationType.Q8_0, None),
        (GGMLQuantizationType.Q4_0, None),
    ],
)
def test_number_formats(tmp_path: Path, kind: GGMLQuantizationType, dtype: str | None) -> None:
    model = tiny_model("qwen2")
    write_gguf(tmp_path / "tiny.gguf", model, "qwen2", kind=kind)
    checkpoint = open_checkpoint(tmp_path / "tiny.gguf")
    assert checkpoint.dtype == dtype
    name = "model.layers.1.mlp.up_proj.weight"
    weight = model.state_dict()[name]
    read = checkpoint.tensor(name)
    if dtype is not None:
        assert torch.equal(read, weight.to(getattr(torch, dtype)))
    else:
        assert torch.equal(read, torch.from_numpy(dequantize(quantize(weight.numpy(), kind), kind)))
        assert torch.corrcoef(torch.stack([read.flatten(), weight.flatten()]))[0, 1] > 0.98


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"rope.scaling.type": "none"}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 128,
                "rope.scaling.yarn_beta_fast": 16.0,
                "rope.scaling.yarn_beta_slow": 2.0,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
            },
        ),
    ],
)
def test_rope_scaling(tmp_path: Path, metadata: dict[str, Any], expected: dict[str, Any] | None) -> None:
    prefixed = {f"qwen2.{key}": value for key, value in metadata.items()}
    write_gguf(tmp_path / "tiny.gguf", tiny_model("qwen2"), "qwen2", metadata=prefixed)
    config = open_checkpoint(tmp_path / "tiny.gguf").config
    assert config["rope_scaling"] == expected
    assert config["rope_theta"] == 10000.0


@pytest.mark.parametrize(
    ("theta", "head_dim", "factor", "low", "high"), [(500000.0, 128, 8.0, 1.0, 4.0), (500000.0, 64, 32.0, 1.0, 4.0)]
)
def test_llama3_rope(tmp_path: Path, theta: float, head_dim: int, factor: float, low: float, high: float) -> None:
    """The file stores only the divisors of the frequencies; the settings behind them give the same table."""
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters={**scaling, "rope_theta": theta},
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = theta ** (-torch.arange(0, head_dim, 2) / head_dim)
    model = tiny_model("llama", head_dim=head_dim)
    metadata = {"llama.rope.freq_base": theta}
    write_gguf(tmp_path / "tiny.gguf", model, "llama", metadata=metadata, extra={"rope_freqs.weight": plain / scaled})
    checkpoint = open_checkpoint(tmp_path / "tiny.gguf")
    found = checkpoint.config["rope_scaling"]
    assert found.pop("rope_type") == scaling.pop("rope_type")
    assert found == pytest.approx(scaling, rel=1e-3)
    assert "rope_freqs.weight" not in checkpoint.tensor_names()

    odd = plain / scaled
    odd[3] = 1.5
    write_gguf(tmp_path / "odd.gguf", model, "llama", metadata=metadata, extra={"rope_freqs.weight": odd})
    with pytest.raises(CheckpointError, match="llama3 rule"):
        open_checkpoint(tmp_path / "odd.gguf")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"qwen2.rope.scaling.type": "longrope", "qwen2.rope.scaling.factor": 2.0}, "longrope"),
        ({"qwen2.rope.scaling.type": "linear"}, "factor None"),
        ({"qwen2.attention.sliding_window": 64}, "sliding window of 64"),
        ({"qwen2.expert_count": 8}, "mixture-of-experts"),
        ({"qwen2.attention.value_length": 8}, r"attention\.value_length is 8"),
        ({"qwen2.rope.dimension_count": 8}, r"rope\.dimension_count is 8"),
        ({"qwen2.attention.head_count_kv": [2, 1]}, "differ in their number of heads"),
        ({"qwen2.embedding_length": None}, r"lacks qwen2\.embedding_length"),
        ({"split.count": 2}, "llama-gguf-split --merge"),
    ],
)
def test_what_is_not_supported(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_model("qwen2"), "qwen2", metadata=metadata)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path / "tiny.gguf")


def test_llama_with_a_sliding_window_is_mistral(tmp_path: Path) -> None:
    metadata = {"llama.attention.sliding_window": 64}
    write_gguf(tmp_path / "tiny.gguf", tiny_model("mistral"), "llama", metadata=metadata)
    config = open_checkpoint(tmp_path / "tiny.gguf").config
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 64)


def test_another_architecture(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_model("qwen2"), "gemma2")
    with pytest.raises(CheckpointError, match="'gemma2' is not supported; these are: llama, qwen2, qwen3"):
        open_checkpoint(tmp_path / "tiny.gguf")


def test_a_tensor_that_no_one_would_use(tmp_path: Path) -> None:
    extra = {"blk.0.attn_sinks.weight": torch.zeros(4)}
    write_gguf(tmp_path / "tiny.gguf", tiny_model("qwen2"), "qwen2", extra=extra)
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_sinks\.weight"):
        open_checkpoint(tmp_path / "tiny.gguf").tensor_names()


@pytest.mark.parametrize("share", [0.0, 0.001, 0.05, 0.9])
def test_truncated(tmp_path: Path, share: float) -> None:
    """failure 67"""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_model("qwen2"), "qwen2")
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(CheckpointError, match="truncated or not a GGUF file"):
        open_checkpoint(path)


def test_generation_defaults(tmp_path: Path) -> None:
    """failure 25 (defaults half): 0 is off here too."""
    metadata = {
        "general.sampling.temp": 0.7,
        "general.sampling.top_k": 0,
        "general.sampling.top_p": 0.95,
        "tokenizer.ggml.eot_token_id": 2,
    }
    write_gguf(tmp_path / "tiny.gguf", tiny_model("qwen2"), "qwen2", metadata=metadata)
    checkpoint = open_checkpoint(tmp_path / "tiny.gguf")
    assert checkpoint.generation.sampling == {"temperature": 0.7, "top_p": 0.95, "top_k": 0}
    assert checkpoint.generation.eos_ids == (0, 2)
    assert checkpoint.chat_template() is None
