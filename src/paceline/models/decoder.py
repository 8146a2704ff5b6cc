"""The one decoder: pre-norm transformer with rotary embedding, grouped-query attention and a SiLU-gated MLP."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.activation import silu_mul
from paceline.kernels.norm import add_rms_norm, rms_norm
from paceline.kernels.rotary import rotary_table, rotate_
from paceline.layers.attention import AttentionBatch
from paceline.layers.attention_backends import attention_backend
from paceline.layers.kv_cache import KVCache, KVLayout
from paceline.layers.linear import Linear, linear_method
from paceline.models.rope import inverse_frequencies
from paceline.models.spec import DecoderSpec

Take = Callable[[str], Tensor]
"""Gives the parameter of this name (see `models/weights.py`), each once."""


@dataclass(frozen=True, slots=True)
class Layer:
    group: int
    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """Weights of a decoder and its forward pass.

    Attributes:
        spec: its shape.
        dtype, device: of weights, activations and KV cache.
    """

    def __init__(self, spec: DecoderSpec, take: Take, *, dtype: torch.dtype, device: torch.device) -> None:
        """Builds the decoder of ``spec`` from the parameters that ``take`` gives, on ``device`` in ``dtype``."""
        self.spec, self.dtype, self.device = spec, dtype, device
        self._method = linear_method(device, dtype)
        self._attention = attention_backend(device, dtype, spec.head_dim)
        self._frequencies = inverse_frequencies(spec.rope, spec.head_dim).to(device)
        self._embedding = take("embedding")
        self._layers = [self._layer(index, take) for index in range(spec.num_layers)]
        self._norm = take("norm")
        self._head = Linear(self._method, self._embedding if spec.tied else take("head"))

    def _layer(self, index: int, take: Take) -> Layer:
        spec = self.spec

        def parameter(name: str) -> Tensor:
            return take(f"layers.{index}.{name}")

        def linear(name: str, bias: bool) -> Linear:
            return Linear(self._method, parameter(f"{name}.weight"), parameter(f"{name}.bias") if bias else None)

        return Layer(
            group=spec.layers[index].group,
            input_norm=parameter("input_norm"),
            qkv=linear("qkv", spec.qkv_bias),
            q_norm=parameter("q_norm") if spec.qk_norm else None,
            k_norm=parameter("k_norm") if spec.qk_norm else None,
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
            dtype=self.dtype,
        )

    def parameters(self) -> Iterator[Tensor]:
        """Every tensor that holds weights, in whatever form its layer keeps it; each once."""
        yield self._embedding
        for layer in self._layers:
            for linear in (layer.qkv, layer.o, layer.gate_up, layer.down):
                yield from (tensor for tensor in (linear.weight, linear.bias) if tensor is not None)
            norms = (layer.input_norm, layer.q_norm, layer.k_norm, layer.mlp_norm)
            yield from (tensor for tensor in norms if tensor is not None)
        yield self._norm
        if self._head.weight is not self._embedding:
            yield self._head.weight

    @torch.inference_mode()
    def forward(self, tokens: Tensor, positions: Tensor, batch: AttentionBatch, cache: KVCache) -> Tensor:
        """Computes a step's tokens and stores their keys and values.

        Args:
            tokens, positions: int64 ``[T]``, as ``batch`` describes them.

        Returns:
            Hidden states after the last norm, ``[T, hidden]``.
        """
        spec, eps = self.spec, self.spec.norm_eps
        q_heads, kv_heads, head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        heads, rotated = q_heads + 2 * kv_heads, q_heads + kv_heads
        attend = self._attention.attend
        plans = [self._attention.plan(batch, group, window, cache) for group, window in enumerate(spec.kv_windows)]
        cos, sin = rotary_table(positions, self._frequencies, spec.rope.attention_factor, self.dtype)
        residual = F.embedding(tokens, self._embedding)
        x = None
        for index, layer in enumerate(self._layers):
            if x is None:
                x = rms_norm(residual, layer.input_norm, eps)
            else:
                x, residual = add_rms_norm(x, residual, layer.input_norm, eps)
            qkv = layer.qkv(x).view(-1, heads, head_dim)
            if layer.q_norm is not None and layer.k_norm is not None:
                qkv[:, :q_heads] = rms_norm(qkv[:, :q_heads], layer.q_norm, eps)
                qkv[:, q_heads:rotated] = rms_norm(qkv[:, q_heads:rotated], layer.k_norm, eps)
            rotate_(qkv[:, :rotated], cos, sin)
            cache.write(index, batch.slots[layer.group], qkv[:, q_heads:])
            x = layer.o(attend(plans[layer.group], qkv[:, :q_heads], cache, index))
            x, residual = add_rms_norm(x, residual, layer.mlp_norm, eps)
            x = layer.down(silu_mul(layer.gate_up(x)))
        assert x is not None, "a decoder has layers"
        return add_rms_norm(x, residual, self._norm, eps)[0]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every token, ``[R, hidden]`` to float32 ``[R, vocab]``."""
        return self._head(hidden).float()
