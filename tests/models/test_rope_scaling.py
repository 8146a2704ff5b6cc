"""Rope scaling: tables equal transformers, limits follow from the kind, unknown things are errors."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from paceline.kernels.rotary import rotary_table
from paceline.models.config import UnsupportedModel
from paceline.models.registry import decoder_spec
from paceline.models.rope import inverse_frequencies

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 2048,
    "rope_theta": 50000.0,
}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
SCALINGS = {
    "none": (None, 2048),
    "default": ({"rope_type": "default"}, 2048),
    "linear float": ({"rope_type": "linear", "factor": 2.0}, 4096),
    "linear int": ({"rope_type": "linear", "factor": 2}, 4096),
    "llama3": ({"rope_type": "llama3", "factor": 8.0, **LLAMA3}, 2048),
    "llama3 int": ({"rope_type": "llama3", "factor": 32, **LLAMA3, "high_freq_factor": 4, "low_freq_factor": 1}, 2048),
    "yarn": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
    "yarn int": ({"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 512}, 1024),
    "yarn without the original length": ({"rope_type": "yarn", "factor": 2.0}, 4096),
    "yarn with attention factor": ({"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.7}, 4096),
    "yarn with betas": ({"rope_type": "yarn", "factor": 8.0, "beta_fast": 16, "beta_slow": 2}, 16384),
    "yarn with mscale": ({"rope_type": "yarn", "factor": 8.0, "mscale": 1.2, "mscale_all_dim": 0.7}, 16384),
    "yarn with mscale alone": ({"rope_type": "yarn", "factor": 8.0, "mscale": 1.2}, 16384),
    "yarn not truncated": ({"rope_type": "yarn", "factor": 8.0, "truncate": False}, 16384),
}


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("name", SCALINGS)
def test_table_and_limit(name, key):
    """Failure 70: both key names, int and float factors, every kind; the reference is transformers' own table."""
    scaling, limit = SCALINGS[name]
    if scaling is not None:
        scaling = {(key if field == "rope_type" else field): value for field, value in scaling.items()}
    spec = decoder_spec({**BASE, "rope_scaling": scaling})
    assert spec.max_position == limit

    config = LlamaConfig(**{k: v for k, v in BASE.items() if k != "architectures"}, rope_scaling=dict(scaling or {}))
    positions = torch.tensor([0, 1, 5, 100, 2047, 9001])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    frequencies = inverse_frequencies(spec.rope, spec.head_dim)
    our_cos, our_sin = rotary_table(positions, frequencies, spec.rope.attention_factor, torch.float32)
    half = spec.head_dim // 2
    our_sin = torch.cat((-our_sin[..., :half], our_sin[..., half:]), -1)
    torch.testing.assert_close(our_cos[:, 0], cos[0], rtol=1e-5, atol=2e-3)
    torch.testing.assert_close(our_sin[:, 0], sin[0], rtol=1e-5, atol=2e-3)
    near = positions <= 100
    torch.testing.assert_close(our_cos[near, 0], cos[0, near], rtol=1e-5, atol=2e-5)


def test_rope_parameters_of_transformers_5():
    """Failure 70."""
    config = {key: value for key, value in BASE.items() if key != "rope_theta"}
    parameters = {"rope_type": "linear", "factor": 4.0, "rope_theta": 777.0}
    spec = decoder_spec({**config, "rope_parameters": parameters})
    assert (spec.rope.kind, spec.rope.factor, spec.rope.theta, spec.max_position) == ("linear", 4.0, 777.0, 8192)


def test_yarn_takes_a_missing_factor_from_the_lengths():
    scaling = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 512}
    spec = decoder_spec({**BASE, "rope_scaling": scaling})
    assert (spec.rope.factor, spec.max_position) == (4.0, 2048)


def test_original_length_beside_the_rope_fields_goes_first():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    spec = decoder_spec({**BASE, "rope_scaling": scaling, "original_max_position_embeddings": 256})
    assert (spec.rope.original_max_position, spec.max_position) == (256, 1024)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"type": "dynamic", "factor": 2.0}, "'dynamic' is not supported; these are: default, linear, llama3, yarn"),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "'longrope' is not supported"),
        ({"rope_type": "default", "type": "mrope"}, "contradicts"),
        ({"rope_type": "default", "mrope_section": [16, 24, 24]}, "mrope_section"),
        ({"rope_type": "linear"}, "lacks factor"),
        ({"rope_type": "linear", "factor": "2"}, "factor must be a number"),
        ({"rope_type": "linear", "factor": 0.5}, "factor must be at least 1"),
        ({"rope_type": "llama3", "factor": 8.0}, "lacks low_freq_factor"),
        ({"rope_type": "llama3", "factor": 8.0, **LLAMA3, "high_freq_factor": 1.0}, "must be above"),
        ({"rope_type": "yarn", "factor": 2.0, "long_factor": [1.0]}, "long_factor"),
        ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"factor": 2.0}, "factor"),
        ({"rope_type": ["x"]}, "rope_type must be a string"),
        ({"type": 5}, "type must be a string"),
        ({"rope_type": "linear", "factor": math.nan}, "factor must be above 0"),
        ({"rope_type": "linear", "factor": math.inf}, "factor must be above 0"),
        ({"rope_type": "llama3", "factor": 8.0, **LLAMA3, "low_freq_factor": -1.0}, "low_freq_factor must be above 0"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": math.nan}, "beta_fast must be above 0"),
        ({"rope_type": "yarn", "factor": 2.0, "mscale": -10.0, "mscale_all_dim": 1.0}, "mscale must be above 0"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": "no"}, "truncate must be true or false"),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": math.nan}, "original_max_position"),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0.5}, "original_max_position"),
        ("linear", "must be an object or null"),
    ],
)
def test_what_is_not_understood_is_an_error(scaling, message):
    """Failure 70: never a warning, never ignored."""
    with pytest.raises(UnsupportedModel, match=message):
        decoder_spec({**BASE, "rope_scaling": scaling})
