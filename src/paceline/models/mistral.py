"""Mistral 7B and its successors: Llama with a sliding window in every layer, or in none."""

from paceline.models.config import Config
from paceline.models.family import build_spec
from paceline.models.spec import DecoderSpec


def mistral_spec(config: Config) -> DecoderSpec:
    for name in ("attention_bias", "mlp_bias"):
        config.require(name, (False,))
    layers = config.size("num_hidden_layers")
    window = config.optional_size("sliding_window", 4096)
    config.require("layer_types", (["sliding_attention" if window else "full_attention"] * layers,))
    return build_spec(config, windows=[window] * layers, num_kv_heads=8)
