"""What a decoder is, as plain data: the families in this folder read it from a config, `Decoder` is built from it."""

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding. Fields beyond ``theta`` count only for the kinds that name them."""

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    """linear, llama3, yarn: how far the context is stretched."""
    original_max_position: int = 0
    """llama3, yarn: context length before stretching."""
    low_freq_factor: float = 1.0
    """llama3."""
    high_freq_factor: float = 1.0
    """llama3."""
    beta_fast: float = 32.0
    """yarn: rotations above which a frequency is left alone."""
    beta_slow: float = 1.0
    """yarn: rotations below which a frequency is fully stretched."""
    truncate: bool = True
    """yarn: round the bounds of the ramp to whole dimensions."""
    attention_factor: float = 1.0
    """yarn: multiplies cosine and sine."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What may differ from one layer to the next."""

    group: int
    """KV group: index into ``DecoderSpec.kv_windows``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Shape of a decoder: RMSNorm, rotary embedding, grouped-query attention and a SiLU-gated feed-forward."""

    architecture: str
    """Name in Hugging Face's vocabulary, e.g. ``LlamaForCausalLM``."""
    vocab_size: int
    """Rows of the embedding and of the head."""
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeSpec
    max_position: int
    """Longest context, in tokens, that the model and its rope scaling were made for."""
    layers: tuple[LayerSpec, ...]
    kv_windows: tuple[int | None, ...]
    """Sliding window of each KV group; None: full attention."""
    tied: bool = False
    """The head is the embedding."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each head of q and k before the rotary embedding."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def q_size(self) -> int:
        """Features of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Features of all key (or value) heads together."""
        return self.num_kv_heads * self.head_dim
