"""Which architectures are supported."""

from collections.abc import Callable, Mapping
from typing import Any

from paceline.models.config import Config, UnsupportedModel
from paceline.models.llama import llama_spec
from paceline.models.mistral import mistral_spec
from paceline.models.qwen2 import qwen2_spec
from paceline.models.qwen3 import qwen3_spec
from paceline.models.spec import DecoderSpec

FAMILIES: dict[str, Callable[[Config], DecoderSpec]] = {
    "LlamaForCausalLM": llama_spec,
    "MistralForCausalLM": mistral_spec,
    "Qwen2ForCausalLM": qwen2_spec,
    "Qwen3ForCausalLM": qwen3_spec,
}
MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Architecture of a config that names only its ``model_type``."""


def decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The decoder that a Hugging Face ``config.json`` describes.

    Raises:
        UnsupportedModel: an architecture or a feature that is not supported; the message says what is.
    """
    fields = Config(config, "model")
    model_type = fields.text("model_type") or ""
    architectures = fields.names("architectures") or [MODEL_TYPES.get(model_type, "")]
    for name in architectures:
        if name in FAMILIES:
            return FAMILIES[name](Config(config, name))
    named = ", ".join(filter(None, architectures)) or model_type or "none named"
    raise UnsupportedModel(f"architecture {named} is not supported; these are: {', '.join(FAMILIES)}")
