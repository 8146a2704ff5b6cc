"""The one decoder: pre-norm transformer with rotary embedding, grouped-query attention and a SiLU-gated MLP."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.layers.attention import AttentionBatch, AttentionSpec, HeadNorms
from paceline.layers.attention_backends import attention_backend
from paceline.layers.embedding import embed
from paceline.layers.fp8_weight import Fp8Weight
from paceline.layers.kv_cache import KVLayout
from paceline.layers.linear import Linear, LinearMethod, Weight, linear_method
from paceline.models.rope import inverse_frequencies
from paceline.models.spec import DecoderSpec

Take = Callable[[str], Any]
"""Gives the parameter of this name (see `models/weights.py`), each once: a tensor, or for a linear layer's weight an
`Fp8Weight`."""


@dataclass(frozen=True, slots=True)
class Layer:
    group: int
    input_norm: Tensor
    qkv: Linear
    head_norms: HeadNorms | None
    o: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """Weights of a decoder and its forward pass.

    Attributes:
        spec: its shape.
        dtype, device: of weights and activations.
        kv_dtype: of keys and values in the cache.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        take: Take,
        *,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """Builds the decoder of ``spec`` from the parameters that ``take`` gives, on ``device`` in ``dtype``."""
        self.spec, self.dtype, self.device, self.kv_dtype = spec, dtype, device, kv_dtype or dtype
        self._methods: dict[type[Weight], LinearMethod] = {
            kind: linear_method(device, dtype, kind) for kind in (Tensor, Fp8Weight)
        }
        attention = AttentionSpec(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            inverse_frequencies=inverse_frequencies(spec.rope, spec.head_dim).to(device),
            rope_scale=spec.rope.attention_factor,
            max_position=spec.max_position,
            norm_eps=spec.norm_eps,
        )
        self._attention = attention_backend(attention, device, dtype, self.kv_dtype)
        self._embedding = take("embedding")
        self._layers = [self._layer(index, take) for index in range(spec.num_layers)]
        self._norm = take("norm")
        self._head = self._linear(self._embedding if spec.tied else take("head"))

    def _linear(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        return Linear(self._methods[Fp8Weight if isinstance(weight, Fp8Weight) else Tensor], weight, bias)

    def _layer(self, index: int, take: Take) -> Layer:
        spec = self.spec

        def parameter(name: str) -> Any:
            return take(f"layers.{index}.{name}")

        def linear(name: str, bias: bool) -> Linear:
            return self._linear(parameter(f"{name}.weight"), parameter(f"{name}.bias") if bias else None)

        return Layer(
            group=spec.layers[index].group,
            input_norm=parameter("input_norm"),
            qkv=linear("qkv", spec.qkv_bias),
            head_norms=HeadNorms(parameter("q_norm"), parameter("k_norm")) if spec.qk_norm else None,
            o=linear("o", spec.o_bias),
            mlp_norm=parameter("mlp_norm"),
            gate_up=linear("gate_up", spec.mlp_bias),
            down=linear("down", spec.mlp_bias),
        )

    def kv_layout(self, block_size: int) -> KVLayout:
        """Layout of a cache for this decoder."""
        return KVLayout(
            layer_groups=tuple(layer.group for layer in self.spec.layers),
            num_kv_heads=self.spec.num_kv_heads,
            head_dim=self.spec.head_dim,
            block_size=block_size,
            dtype=self.kv_dtype,
        )

    def make_cache(self, layout: KVLayout, num_blocks: Sequence[int]) -> Any:
        """A KV cache for `forward`, with so many blocks for each KV group, the sink included."""
        return self._attention.make_cache(layout, num_blocks, self.device)

    def parameters(self) -> Iterator[Tensor]:
        """Every tensor that holds weights, in whatever form its layer keeps it; each once."""
        yield self._embedding
        for layer in self._layers:
            for linear in (layer.qkv, layer.o, layer.gate_up, layer.down):
                yield from linear.tensors()
            yield from (layer.input_norm, layer.mlp_norm)
            if layer.head_norms is not None:
                yield from (layer.head_norms.query, layer.head_norms.key)
        yield self._norm
        if self._head.weight is not self._embedding:
            yield from self._head.tensors()

    @torch.inference_mode()
    def forward(
        self, tokens: Tensor, batch: AttentionBatch, cache: Any, *, layers: Sequence[int] | None = None
    ) -> Tensor:
        """Computes a step's tokens and stores their keys and values.

        Args:
            tokens: ids ``[T]``, as ``batch`` describes them.
            cache: from `make_cache`.
            layers: those to compute, to see how it is done; None: all.

        Returns:
            Hidden states after the last norm, ``[T, hidden]``.
        """
        eps = self.spec.norm_eps
        plans = [self._attention.plan(batch, group, window, cache) for group, window in enumerate(self.spec.kv_windows)]
        residual, delta = embed(tokens, self._embedding), None
        for index in range(len(self._layers)) if layers is None else layers:
            layer = self._layers[index]
            x, residual = layer.qkv.normalise(delta, residual, layer.input_norm, eps)
            attended = self._attention.attend(plans[layer.group], layer.qkv(x), layer.head_norms, cache, index)
            x, residual = layer.gate_up.normalise(layer.o(attended), residual, layer.mlp_norm, eps)
            delta = layer.down(layer.gate_up.gated(x))
        return self._head.norm(delta, residual, self._norm, eps)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every token, ``[R, hidden]`` to ``[R, vocab]``; float32 on a CPU, the model's dtype on a GPU."""
        logits = self._head(hidden)
        return logits if logits.is_cuda else logits.float()
