"""A GGUF file, translated to Hugging Face's vocabulary."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType
from gguf.quants import dequantize

from paceline.checkpoint.chat_template import ChatTemplate
from paceline.checkpoint.error import CheckpointError
from paceline.checkpoint.generation import GenerationDefaults, generation_defaults
from paceline.checkpoint.gguf_config import PERMUTED, gguf_config
from paceline.checkpoint.gguf_tokenizer import gguf_special_tokens, gguf_tokenizer
from paceline.checkpoint.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch
    from gguf import ReaderTensor

_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
"""Not a weight: it becomes ``rope_scaling``."""
_DTYPES = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
}
_SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


class _Reader(GGUFReader):
    """The library's reader over a plain array: it slices for each token, and a ``memmap`` slices slowly."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)


class GGUFCheckpoint:
    """Implements ``Checkpoint``. The file is memory-mapped; a tensor is dequantised when it is read."""

    def __init__(self, path: Path) -> None:
        try:
            reader = _Reader(path)
        except (ValueError, OSError, IndexError, KeyError) as error:
            raise CheckpointError(f"{path} is truncated or not a GGUF file ({error}): download it again") from error
        self.name = path.stem
        self.metadata = _metadata(reader)
        if self.metadata.get("split.count", 1) > 1:
            raise CheckpointError(f"{path} is one part of several: join them with `llama-gguf-split --merge`")
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        factors = self._tensors.get(_ROPE_FACTORS)
        shapes = {name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in self._tensors.items()}
        self.config: dict[str, Any] = gguf_config(
            self.metadata, shapes, None if factors is None else [float(factor) for factor in factors.data]
        )

    @property
    def dtype(self) -> str | None:
        types = {tensor.tensor_type for tensor in self._tensors.values() if len(tensor.shape) > 1}
        return _DTYPES.get(types.pop()) if len(types) == 1 else None

    @cached_property
    def generation(self) -> GenerationDefaults:
        stated = {name: self.metadata.get(key) for name, key in _SAMPLING.items()}
        return generation_defaults(stated, self.config, None)

    def tensor_names(self) -> Sequence[str]:
        return tuple(self._names)

    def tensor(self, name: str) -> "torch.Tensor":
        if name not in self._names:
            raise CheckpointError(f"{self.name} has no tensor {name}")
        tensor = _read(self._tensors[self._names[name]])
        projection = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(projection)
        if heads is not None and self.metadata["general.architecture"] in PERMUTED:
            tensor = unpermute(tensor, self.config[heads])
        return tensor.contiguous()

    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def chat_template(self) -> ChatTemplate | None:
        return self._chat_template

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return gguf_tokenizer(self.metadata)

    @cached_property
    def _chat_template(self) -> ChatTemplate | None:
        source = self.metadata.get("tokenizer.chat_template")
        if source is None:
            return None
        return ChatTemplate(
            source,
            tool_source=self.metadata.get("tokenizer.chat_template.tool_use"),
            special_tokens=gguf_special_tokens(self.metadata),
        )

    @cached_property
    def _names(self) -> dict[str, str]:
        """Hugging Face name -> GGUF name."""
        names, unknown = {}, []
        for stored in self._tensors:
            if stored == _ROPE_FACTORS:
                continue
            translated = _translate(stored)
            if translated is None:
                unknown.append(stored)
            else:
                names[translated] = stored
        if unknown:
            raise CheckpointError(f"{self.name} holds tensors that this architecture should not: {', '.join(unknown)}")
        return names


def unpermute(weight: "torch.Tensor", heads: int) -> "torch.Tensor":
    """Undoes the row order of llama.cpp's q and k projections.

    llama.cpp rotates neighbouring pairs of a head (rows 2i and 2i + 1), Hugging Face's code rotates the two halves
    (rows i and i + head_dim / 2), and its converter reorders the rows of each head for that.

    Args:
        weight: [heads x head_dim, ...].
        heads: number of heads of this projection.
    """
    pairs = weight.shape[0] // heads // 2
    return weight.reshape(heads, pairs, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def _read(stored: "ReaderTensor") -> "torch.Tensor":
    import torch

    if stored.tensor_type == GGMLQuantizationType.BF16:
        return torch.from_numpy(stored.data.view("int16").copy()).view(torch.bfloat16)
    if stored.tensor_type in _DTYPES:
        return torch.from_numpy(stored.data.copy())
    try:
        return torch.from_numpy(dequantize(stored.data, stored.tensor_type))
    except NotImplementedError as error:
        raise CheckpointError(
            f"{stored.name} is stored as {stored.tensor_type.name}, which is not supported"
        ) from error


def _translate(stored: str) -> str | None:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``; None for a name that is not known."""
    module, _, kind = stored.rpartition(".")
    if kind not in ("weight", "bias"):
        return None
    if module in _TENSORS:
        return f"{_TENSORS[module]}.{kind}"
    block, _, rest = module.removeprefix("blk.").partition(".")
    if module.startswith("blk.") and block.isdigit() and rest in _LAYER_TENSORS:
        return f"model.layers.{block}.{_LAYER_TENSORS[rest]}.{kind}"
    return None


def _metadata(reader: GGUFReader) -> Mapping[str, Any]:
    """Key -> Python value. Numbers stored as float32 come back as they were written (0.1, not 0.10000000149)."""
    values = {}
    for key, entry in reader.fields.items():
        value = entry.contents()
        values[key] = float(f"{value:.7g}") if entry.types == [GGUFValueType.FLOAT32] else value
    return values
