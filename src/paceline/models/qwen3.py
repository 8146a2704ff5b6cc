"""Qwen 3: q and k normalised per head, head size independent of the hidden size."""

from paceline.models.config import Config
from paceline.models.family import build_spec, qwen_windows
from paceline.models.spec import DecoderSpec


def qwen3_spec(config: Config) -> DecoderSpec:
    config.require("mlp_bias", (False,))
    bias = config.flag("attention_bias")
    return build_spec(
        config,
        windows=qwen_windows(config),
        num_kv_heads=32,
        head_dim=128,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
    )
