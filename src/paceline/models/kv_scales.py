"""Scales of an FP8 KV cache, as calibrated checkpoints carry them, moved into the weights around the cache.

The cache itself works with scale 1. Keys come into its range by a key projection that is smaller and a query projection
that is larger by the same factor, values by a smaller value projection and a larger output projection. The factors are
the scales rounded up to powers of two: they change no other bit of the result, and a floating-point format has the same
relative error anywhere between two of them.
"""

import math
import re
from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.models.spec import DecoderSpec

_NAME = re.compile(r"model\.layers\.(\d+)\.self_attn\.(?:(q|k|v|kv)_scale|([qkv])_proj\.(?:[qkv]|output)_scale)")
"""The names of every tool that writes them. Those of queries are left unread: queries stay as they are."""


def is_kv_scale(name: str, spec: DecoderSpec) -> bool:
    """Whether a tensor of an FP8 checkpoint is a scale of keys, values or queries."""
    match = _NAME.fullmatch(name)
    return match is not None and int(match[1]) < spec.num_layers


def kv_factors(spec: DecoderSpec, scales: Mapping[str, float]) -> dict[str, Tensor]:
    """What the rows of parameters are multiplied by.

    Args:
        scales: what a stored key or value is multiplied by, above 0, by the name that `is_kv_scale` knows.

    Returns:
        Float32 ``[rows]`` by the parameter's name, see `models/weights.py`.
    """
    found: dict[int, dict[str, float]] = {}
    for name, scale in scales.items():
        match = _NAME.fullmatch(name)
        assert match is not None
        for kind in match[2] or match[3]:
            found.setdefault(int(match[1]), {})[kind] = 2.0 ** math.ceil(math.log2(scale))
    factors: dict[str, Tensor] = {}
    for layer, kinds in found.items():
        prefix, key, value = f"layers.{layer}", kinds.get("k", 1.0), kinds.get("v", 1.0)
        query_rows, key_rows, value_rows = (torch.ones(size) for size in (spec.q_size, spec.kv_size, spec.kv_size))
        if spec.qk_norm:  # undoes whatever the projection does
            factors[f"{prefix}.q_norm"] = torch.full((spec.head_dim,), key)
            factors[f"{prefix}.k_norm"] = torch.full((spec.head_dim,), 1 / key)
        else:
            query_rows, key_rows = query_rows * key, key_rows / key
        qkv = torch.cat([query_rows, key_rows, value_rows / value])
        factors |= {f"{prefix}.qkv.weight": qkv, f"{prefix}.qkv.bias": qkv}
        factors[f"{prefix}.o.weight"] = torch.full((spec.hidden_size,), value)
    return factors
