"""From configs to specs: what is read, and what is refused."""

import math

import pytest

from paceline.checkpoint.error import CheckpointError
from paceline.models.registry import decoder_spec
from paceline.models.spec import LayerSpec

COMMON = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "max_position_embeddings": 512,
}


def config(architecture, **fields):
    return {"architectures": [architecture], **COMMON, **fields}


def test_defaults_of_each_family():
    llama = decoder_spec(config("LlamaForCausalLM"))
    assert (llama.num_kv_heads, llama.head_dim, llama.kv_windows) == (32, 2, (None,))
    assert not any((llama.qkv_bias, llama.o_bias, llama.mlp_bias, llama.qk_norm, llama.tied))
    mistral = decoder_spec(config("MistralForCausalLM"))
    assert (mistral.num_kv_heads, mistral.kv_windows) == (8, (4096,))
    qwen2 = decoder_spec(config("Qwen2ForCausalLM"))
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.kv_windows) == (True, False, (None,))
    qwen3 = decoder_spec(config("Qwen3ForCausalLM"))
    assert (qwen3.qk_norm, qwen3.head_dim, qwen3.qkv_bias) == (True, 128, False)
    assert decoder_spec({**COMMON, "model_type": "qwen3"}) == qwen3


def test_llama_biases():
    spec = decoder_spec(config("LlamaForCausalLM", attention_bias=True, mlp_bias=True))
    assert spec.qkv_bias
    assert spec.o_bias
    assert spec.mlp_bias


@pytest.mark.parametrize(("stated", "windows"), [(None, (None,)), (128, (128,))])
def test_mistral_window(stated, windows):
    assert decoder_spec(config("MistralForCausalLM", sliding_window=stated)).kv_windows == windows


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_qwen_windows(architecture):
    fields = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3}
    spec = decoder_spec(config(architecture, **fields))
    assert spec.kv_windows == (None, 16)
    assert spec.layers == (LayerSpec(0), LayerSpec(0), LayerSpec(0), LayerSpec(1))
    assert decoder_spec(config(architecture, **fields | {"use_sliding_window": False})).kv_windows == (None,)
    types = ["sliding_attention", "full_attention"] * 2
    spec = decoder_spec(config(architecture, **fields, layer_types=types))
    assert spec.kv_windows == (16, None)
    assert [layer.group for layer in spec.layers] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("GemmaForCausalLM", {}, "GemmaForCausalLM is not supported; these are: LlamaForCausalLM, Mistral"),
        ("LlamaForCausalLM", {"hidden_act": "gelu"}, "hidden_act='gelu' .* only 'silu', 'swish'"),
        ("LlamaForCausalLM", {"sliding_window": 64}, "sliding_window=64"),
        ("LlamaForCausalLM", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("LlamaForCausalLM", {"rope_interleaved": True}, "rope_interleaved"),
        ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("LlamaForCausalLM", {"hidden_size": None}, "lacks hidden_size"),
        ("LlamaForCausalLM", {"hidden_size": 64.0}, "hidden_size must be a whole number"),
        ("LlamaForCausalLM", {"num_hidden_layers": True}, "num_hidden_layers must be a whole number"),
        ("LlamaForCausalLM", {"hidden_size": 65}, "no multiple of num_attention_heads"),
        ("LlamaForCausalLM", {"num_key_value_heads": 5}, "no multiple of num_key_value_heads"),
        ("LlamaForCausalLM", {"head_dim": 15}, "head_dim must be even"),
        ("LlamaForCausalLM", {"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ("LlamaForCausalLM", {"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a number"),
        ("LlamaForCausalLM", {"rms_norm_eps": math.nan}, "rms_norm_eps must be above 0"),
        ("LlamaForCausalLM", {"rms_norm_eps": 0}, "rms_norm_eps must be above 0"),
        ("LlamaForCausalLM", {"rope_theta": 0}, "rope_theta must be above 1"),
        ("LlamaForCausalLM", {"rope_theta": -5.0}, "rope_theta must be above 1"),
        ("LlamaForCausalLM", {"rope_theta": math.nan}, "rope_theta must be above 1"),
        ("LlamaForCausalLM", {"rope_theta": math.inf}, "rope_theta must be above 1"),
        ("LlamaForCausalLM", {"rope_theta": 10**400}, "rope_theta must be above 1"),
        ("LlamaForCausalLM", {"rope_theta": [1]}, "rope_theta must be a number"),
        ("LlamaForCausalLM", {"architectures": 5}, "architectures must be a list of strings"),
        ("LlamaForCausalLM", {"architectures": "LlamaForCausalLM"}, "architectures must be a list of strings"),
        ("LlamaForCausalLM", {"architectures": [["x"]]}, "architectures must be a list of strings"),
        ("LlamaForCausalLM", {"architectures": None, "model_type": ["llama"]}, "model_type must be a string"),
        ("LlamaForCausalLM", {"hidden_size": 10**30}, "hidden_size must be a whole number"),
        ("Qwen2ForCausalLM", {"layer_types": 5}, "layer_types must be a list of strings"),
        ("Qwen2ForCausalLM", {"layer_types": [["x"]] * 4}, "layer_types must be a list of strings"),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "max_window_layers": "x"},
            "max_window_layers must be a whole",
        ),
        ("MistralForCausalLM", {"attention_bias": True}, "attention_bias=True"),
        ("MistralForCausalLM", {"layer_types": ["full_attention"] * 4}, "layer_types"),
        ("Qwen2ForCausalLM", {"attention_bias": False}, "attention_bias=False"),
        ("Qwen2ForCausalLM", {"mlp_bias": True}, "mlp_bias=True"),
        ("Qwen2ForCausalLM", {"layer_types": ["full_attention"]}, "for each of 4 layers"),
        ("Qwen2ForCausalLM", {"layer_types": ["chunked_attention"] * 4}, "layer_types must name"),
        ("Qwen3ForCausalLM", {"layer_types": ["sliding_attention"] * 4}, "use_sliding_window or sliding_window is off"),
    ],
)
def test_refused(architecture, fields, message):
    with pytest.raises(CheckpointError, match=message):
        decoder_spec(config(architecture, **fields))


def test_neutral_fields_pass():
    spec = decoder_spec(
        config(
            "LlamaForCausalLM",
            rope_interleaved=False,
            is_llama_config=True,
            attn_logit_softcapping=None,
            sliding_window=None,
            pretraining_tp=1,
            use_cache=True,
        )
    )
    assert spec.architecture == "LlamaForCausalLM"
