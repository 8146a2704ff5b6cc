"""Llama 1 to 3, and the many models that share its architecture."""

from paceline.models.config import Config
from paceline.models.family import build_spec
from paceline.models.spec import DecoderSpec


def llama_spec(config: Config) -> DecoderSpec:
    config.require("sliding_window", ())
    layers, heads = config.size("num_hidden_layers"), config.size("num_attention_heads")
    config.require("layer_types", (["full_attention"] * layers,))
    bias = config.flag("attention_bias")
    return build_spec(
        config,
        windows=[None] * layers,
        num_kv_heads=heads,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.flag("mlp_bias"),
    )
