"""GGUF metadata to the vocabulary of Hugging Face's config.json."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.checkpoint.error import CheckpointError

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
PERMUTED = ("llama",)
"""Architectures whose q and k rows the converter reorders. Mistral's files say ``llama`` too."""


def gguf_config(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], rope_factors: Sequence[float] | None
) -> dict[str, Any]:
    """Translates the metadata of a supported architecture.

    Args:
        shapes: of the stored tensors, [out, in]; they decide what metadata leaves open: rows of the embedding,
            whether there is an output head and which projections have biases.
        rope_factors: the tensor ``rope_freqs.weight`` [head_dim / 2], by which Llama 3 divides its frequencies.

    Raises:
        CheckpointError: another architecture, or a feature that the translation does not cover.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        supported = ", ".join(_ARCHITECTURES)
        raise CheckpointError(f"GGUF architecture {architecture!r} is not supported; these are: {supported}")

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{architecture}.{key}", default)

    def need(key: str) -> Any:
        if (value := get(key)) is None:
            raise CheckpointError(f"the GGUF file lacks {architecture}.{key}")
        return value

    if "token_embd.weight" not in shapes:
        raise CheckpointError("the GGUF file lacks token_embd.weight")
    if get("expert_count", 0):
        raise CheckpointError("GGUF files with mixture-of-experts layers are not supported")
    hidden, heads = need("embedding_length"), need("attention.head_count")
    kv_heads = get("attention.head_count_kv", heads)
    if isinstance(heads, list) or isinstance(kv_heads, list):
        raise CheckpointError("GGUF files whose layers differ in their number of heads are not supported")
    head_dim = get("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if get(key, head_dim) != head_dim:
            raise CheckpointError(f"{architecture}.{key} is {get(key)}; only the head size, {head_dim}, is supported")
    if (window := get("attention.sliding_window")) and architecture != "llama":
        raise CheckpointError(f"{architecture} with a sliding window of {window} is not supported in GGUF files")
    return {
        "architectures": ["MistralForCausalLM" if window else _ARCHITECTURES[architecture]],
        "model_type": "mistral" if window else architecture,
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden,
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": need("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": need("context_length"),
        "sliding_window": window or None,
        "rope_theta": get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(get, head_dim, rope_factors),
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
        "tie_word_embeddings": "output.weight" not in shapes,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos_ids(metadata),
    }


def _eos_ids(metadata: Mapping[str, Any]) -> list[int] | None:
    """End of sequence, of turn and of message, as far as the file names them."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    return list(dict.fromkeys(metadata[key] for key in keys if key in metadata)) or None


def _rope_scaling(get: Any, head_dim: int, factors: Sequence[float] | None) -> dict[str, Any] | None:
    kind = get("rope.scaling.type", "none")
    if factors is not None and any(factor != 1.0 for factor in factors):
        if kind != "none":
            raise CheckpointError(f"rope_freqs.weight together with rope scaling {kind!r} is not supported")
        original = get("rope.scaling.original_context_length", 8192)
        return llama3_scaling(factors, get("rope.freq_base", 10000.0), head_dim, original)
    if kind == "none":
        return None
    factor = get("rope.scaling.factor")
    if kind not in ("linear", "yarn") or not factor:
        raise CheckpointError(f"rope scaling {kind!r} with factor {factor} is not supported; linear and yarn are")
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "linear":
        return scaling
    if get("rope.scaling.yarn_ext_factor", 1.0) != 1.0 or get("rope.scaling.yarn_log_multiplier", 0.0) != 0.0:
        raise CheckpointError("yarn_ext_factor and yarn_log_multiplier are not supported")
    if (original := get("rope.scaling.original_context_length")) is not None:
        scaling["original_max_position_embeddings"] = original
    attention = get("rope.scaling.yarn_attn_factor", get("rope.scaling.attn_factor", 1.0))
    if attention != 1.0:
        scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
    for name in ("beta_fast", "beta_slow"):
        if (beta := get(f"rope.scaling.yarn_{name}")) is not None:
            scaling[name] = beta
    return scaling


def llama3_scaling(factors: Sequence[float], theta: float, head_dim: int, original: int) -> dict[str, Any]:
    """Finds the ``llama3`` rope settings behind the divisors that a GGUF file stores.

    Between the two borders the share of the unscaled frequency is linear in the frequency (Llama 3.1's published
    code), so two frequencies between the borders fix both. ``original`` only sets the unit of the borders: any value
    gives the same frequencies.

    Args:
        factors: [head_dim / 2], 1 for high frequencies, rising to the scale for low ones.

    Raises:
        CheckpointError: the divisors do not follow that rule.
    """
    scale = max(factors)
    turns = [original * theta ** (-2 * i / head_dim) / (2 * math.pi) for i in range(len(factors))]
    middle = [i for i, factor in enumerate(factors) if 1.0001 < factor < 0.9999 * scale]
    refusal = "rope_freqs.weight does not follow the llama3 rule, and no other rule is supported"
    if len(middle) < 2 or len(factors) != head_dim // 2:
        raise CheckpointError(refusal)

    def share(factor: float) -> float:
        return (scale / factor - 1.0) / (scale - 1.0)

    first, last = middle[0], middle[-1]
    width = (turns[first] - turns[last]) / (share(factors[first]) - share(factors[last]))
    low = turns[last] - share(factors[last]) * width
    for turn, factor in zip(turns, factors, strict=True):
        smooth = min(max((turn - low) / width, 0.0), 1.0)
        if not math.isclose(scale / (1.0 + smooth * (scale - 1.0)), factor, rel_tol=1e-3):
            raise CheckpointError(refusal)
    return {
        "rope_type": "llama3",
        "factor": float(f"{scale:.6g}"),
        "low_freq_factor": float(f"{low:.4g}"),
        "high_freq_factor": float(f"{low + width:.4g}"),
        "original_max_position_embeddings": original,
    }
