"""What the families have in common: from a checked config to a spec."""

from collections.abc import Sequence

from paceline.models.config import Config, UnsupportedModel, whole
from paceline.models.rope import rope_spec
from paceline.models.spec import DecoderSpec, LayerSpec


def build_spec(
    config: Config,
    *,
    windows: Sequence[int | None],
    num_kv_heads: int,
    head_dim: int | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> DecoderSpec:
    """Reads the fields that all families share.

    Args:
        windows: sliding window of each layer, None for full attention.
        num_kv_heads: the family's default where the config gives none.
        head_dim: likewise; None: hidden size over heads.
    """
    config.require_neutral()
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    if config.value("head_dim") is None and head_dim is None and hidden % heads:
        raise UnsupportedModel(f"hidden_size {hidden} is no multiple of num_attention_heads {heads}")
    head_dim = config.size("head_dim", head_dim or hidden // heads)
    kv_heads = config.size("num_key_value_heads", num_kv_heads)
    if heads % kv_heads:
        raise UnsupportedModel(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    if head_dim % 2:
        raise UnsupportedModel(f"head_dim must be even, not {head_dim}")
    groups = tuple(dict.fromkeys(windows))
    rope, max_position = rope_spec(config)
    return DecoderSpec(
        architecture=config.architecture,
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.size("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=config.number("rms_norm_eps", 1e-6, above=0.0, below=1.0),
        rope=rope,
        max_position=max_position,
        layers=tuple(LayerSpec(groups.index(window)) for window in windows),
        kv_windows=groups,
        tied=config.flag("tie_word_embeddings"),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
    )


def qwen_windows(config: Config) -> list[int | None]:
    """Windows of Qwen 2 and 3: ``layer_types`` where given, else the layers from ``max_window_layers`` on slide."""
    layers = config.size("num_hidden_layers")
    window = config.optional_size("sliding_window", 4096) if config.flag("use_sliding_window") else None
    types = config.names("layer_types")
    if types is None:
        first = whole("max_window_layers", config.value("max_window_layers", 28), 0)
        types = ["sliding_attention" if window and layer >= first else "full_attention" for layer in range(layers)]
    return layer_windows(types, layers, window)


def layer_windows(types: Sequence[str], layers: int, window: int | None) -> list[int | None]:
    """Windows that ``layer_types`` names."""
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown or len(types) != layers:
        raise UnsupportedModel(
            f"layer_types must name full_attention or sliding_attention for each of {layers} layers, not {types!r}"
        )
    if window is None and "sliding_attention" in types:
        raise UnsupportedModel("layer_types names sliding_attention, but use_sliding_window or sliding_window is off")
    return [window if kind == "sliding_attention" else None for kind in types]
