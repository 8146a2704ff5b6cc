"""Writes tiny GGUF files as llama.cpp's converter would."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        layer, _, rest = module.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{NAMES[rest]}.{kind}"
    return f"{NAMES[module]}.{kind}"


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Row i of the first half of each head is followed by row i of the second half."""
    size = weight.shape[0] // heads
    order = [
        head * size + half * (size // 2) + pair for head in range(heads) for pair in range(size // 2) for half in (0, 1)
    ]
    return weight[order]


def write_gguf(
    path: Path,
    model: Any,
    architecture: str,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, torch.Tensor] | None = None,
) -> None:
    """Writes the weights of a transformers model, matrices as ``kind``. ``metadata`` overrides keys; None drops one."""
    config = model.config
    values: dict[str, Any] = {
        f"{architecture}.block_count": config.num_hidden_layers,
        f"{architecture}.context_length": config.max_position_embeddings,
        f"{architecture}.embedding_length": config.hidden_size,
        f"{architecture}.feed_forward_length": config.intermediate_size,
        f"{architecture}.attention.head_count": config.num_attention_heads,
        f"{architecture}.attention.head_count_kv": config.num_key_value_heads,
        f"{architecture}.attention.key_length": config.head_dim,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{architecture}.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["<eos>", "a", "b"],
        "tokenizer.ggml.eos_token_id": 0,
        **(metadata or {}),
    }
    writer = GGUFWriter(path, architecture)
    for key, value in values.items():
        match value:
            case None:
                continue
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors = {gguf_name(name): (name, tensor) for name, tensor in stored_tensors(model).items()}
    for name, (original, tensor) in tensors.items():
        projection = original.split(".")[-2]
        if architecture == "llama" and projection in heads:
            tensor = interleaved(tensor, heads[projection])
        array = np.ascontiguousarray(tensor.numpy())
        if array.ndim == 1:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, quantize(array, kind), raw_dtype=kind)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stored_tensors(model: Any) -> dict[str, torch.Tensor]:
    """The state dict without a tied head."""
    tied = model.config.tie_word_embeddings
    return {name: tensor for name, tensor in model.state_dict().items() if not (tied and name == "lm_head.weight")}
