"""Which tensors of a checkpoint make up which parameter of the decoder: the one place that knows their names."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.models.spec import DecoderSpec

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter and where it comes from."""

    name: str
    sources: tuple[tuple[str, Shape], ...]
    """Tensors of the checkpoint and their shapes; laid one after the other along the first dimension."""
    may_be_fp8: bool = False
    """Weight of a linear layer other than the head."""

    @property
    def shape(self) -> Shape:
        return (sum(shape[0] for _, shape in self.sources), *self.sources[0][1][1:])


HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"

_BUFFERS = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
"""Tensors that old checkpoints carry and that follow from the config."""

_WEIGHT_SCALES = ("weight_scale", "weight_scale_inv")
_INPUT_SCALES = ("input_scale", "activation_scale")
"""Both what a stored number is multiplied by. The second name is that of transformers."""


def is_buffer(name: str) -> bool:
    """Whether a checkpoint's tensor may be left unread."""
    return _BUFFERS.fullmatch(name) is not None


def weight_scale_names(weight: str) -> tuple[str, ...]:
    """Names that the scale of an FP8 weight may have."""
    return tuple(weight.removesuffix("weight") + name for name in _WEIGHT_SCALES)


def input_scale_names(weight: str) -> tuple[str, ...]:
    """Names that the static scale of the tokens of an FP8 weight's layer may have."""
    return tuple(weight.removesuffix("weight") + name for name in _INPUT_SCALES)


def parameter_table(spec: DecoderSpec) -> list[Parameter]:
    """Every parameter of the decoder, in the order of the forward pass."""
    hidden = spec.hidden_size
    table = [Parameter("embedding", ((EMBEDDING, (spec.vocab_size, hidden)),))]
    for layer in range(spec.num_layers):
        table += _layer(spec, f"layers.{layer}", f"model.layers.{layer}")
    table.append(Parameter("norm", (("model.norm.weight", (hidden,)),)))
    if not spec.tied:
        table.append(Parameter("head", ((HEAD, (spec.vocab_size, hidden)),)))
    return table


def _layer(spec: DecoderSpec, target: str, source: str) -> Iterator[Parameter]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    attention, mlp = f"{source}.self_attn", f"{source}.mlp"
    q = (f"{attention}.q_proj", spec.q_size)
    k, v = ((f"{attention}.{name}_proj", spec.kv_size) for name in "kv")
    gate_up = ((f"{mlp}.gate_proj", inner), (f"{mlp}.up_proj", inner))
    yield Parameter(f"{target}.input_norm", ((f"{source}.input_layernorm.weight", (hidden,)),))
    yield from _linear(f"{target}.qkv", (q, k, v), hidden, spec.qkv_bias)
    if spec.qk_norm:
        yield Parameter(f"{target}.q_norm", ((f"{attention}.q_norm.weight", (spec.head_dim,)),))
        yield Parameter(f"{target}.k_norm", ((f"{attention}.k_norm.weight", (spec.head_dim,)),))
    yield from _linear(f"{target}.o", ((f"{attention}.o_proj", hidden),), spec.q_size, spec.o_bias)
    yield Parameter(f"{target}.mlp_norm", ((f"{source}.post_attention_layernorm.weight", (hidden,)),))
    yield from _linear(f"{target}.gate_up", gate_up, hidden, spec.mlp_bias)
    yield from _linear(f"{target}.down", ((f"{mlp}.down_proj", hidden),), inner, spec.mlp_bias)


def _linear(target: str, parts: tuple[tuple[str, int], ...], inputs: int, bias: bool) -> Iterator[Parameter]:
    yield Parameter(f"{target}.weight", tuple((f"{name}.weight", (rows, inputs)) for name, rows in parts), True)
    if bias:
        yield Parameter(f"{target}.bias", tuple((f"{name}.bias", (rows,)) for name, rows in parts))
