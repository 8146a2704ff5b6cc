"""Qwen 2 and 2.5: biases on q, k and v."""

from paceline.models.config import Config
from paceline.models.family import build_spec, qwen_windows
from paceline.models.spec import DecoderSpec


def qwen2_spec(config: Config) -> DecoderSpec:
    config.require("attention_bias", (True,))
    config.require("mlp_bias", (False,))
    return build_spec(config, windows=qwen_windows(config), num_kv_heads=32, qkv_bias=True)
