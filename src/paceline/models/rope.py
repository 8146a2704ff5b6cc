"""Rotary position embedding: from a config to frequencies, for each way of stretching the context."""

import math
from typing import Any, cast, get_args

import torch
from torch import Tensor

from paceline.models.config import Config, UnsupportedModel, number
from paceline.models.spec import RopeKind, RopeSpec

_KINDS: tuple[str, ...] = get_args(RopeKind)
_COMMON = ("type", "rope_type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "finetuned",
    ),
}
"""Fields that each kind may have beside the common ones."""


def rope_spec(config: Config) -> tuple[RopeSpec, int]:
    """Reads ``rope_scaling`` (or transformers 5's ``rope_parameters``) and ``max_position_embeddings``.

    Returns:
        The embedding, and the longest context that it gives: for ``linear`` and ``yarn`` the unscaled length times the
        factor; for ``llama3`` ``max_position_embeddings``, which counts the scaling in.

    Raises:
        UnsupportedModel: unknown kind or field, or a value that makes no sense.
    """
    scaling = config.value("rope_scaling") or config.value("rope_parameters") or {}
    if not isinstance(scaling, dict):
        raise UnsupportedModel(f"rope_scaling must be an object or null, not {scaling!r}")
    scaling = {name: value for name, value in scaling.items() if value is not None}
    kind = _kind(scaling)
    _check_fields(kind, scaling)
    max_position = config.size("max_position_embeddings")
    theta = number("rope_theta", scaling.get("rope_theta", config.value("rope_theta", 10000.0)), above=1.0)
    if kind == "default":
        return RopeSpec(theta=theta), max_position
    # A length beside the rope fields goes before the one among them, as in transformers.
    original = config.value("original_max_position_embeddings", scaling.get("original_max_position_embeddings"))
    original = int(
        number("original_max_position_embeddings", max_position if original is None else original, above=0.0)
    )
    if original < 1:
        raise UnsupportedModel(f"original_max_position_embeddings must be above 0, not {original}")
    if kind == "yarn" and "factor" not in scaling:
        scaling["factor"] = max_position / original
    factor = _need(kind, scaling, "factor")
    if factor < 1:
        raise UnsupportedModel(f"rope scaling: factor must be at least 1, not {factor}")
    if kind == "linear":
        return RopeSpec(theta=theta, kind=kind, factor=factor), int(original * factor)
    if kind == "llama3":
        low, high = (_need(kind, scaling, f"{name}_freq_factor") for name in ("low", "high"))
        if high <= low:
            raise UnsupportedModel(f"rope scaling: high_freq_factor {high} must be above low_freq_factor {low}")
        llama3 = RopeSpec(
            theta=theta,
            kind=kind,
            factor=factor,
            original_max_position=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
        return llama3, max_position
    yarn = RopeSpec(
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_position=original,
        beta_fast=number("beta_fast", scaling.get("beta_fast") or 32.0, above=0.0),
        beta_slow=number("beta_slow", scaling.get("beta_slow") or 1.0, above=0.0),
        truncate=Config(scaling, config.architecture).flag("truncate", True),
        attention_factor=_yarn_attention_factor(factor, scaling),
    )
    return yarn, int(original * factor)


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """Radians per position of each pair of dimensions, float32 ``[head_dim / 2]``.

    Sources: RoFormer (arXiv 2104.09864); linear: position interpolation (arXiv 2306.15595); llama3: Llama 3.1's
    reference code; yarn: arXiv 2309.00071, section 3.2. Rounding follows transformers.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    wavelengths = rope.theta**exponents  # in positions, over 2 pi
    plain = 1.0 / wavelengths
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        # Turns in the original context decide: few turns are stretched, many are left alone, a ramp lies between.
        turns = rope.original_max_position / (2 * math.pi / plain)
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = keep.clamp(0, 1)
        return (1 - keep) * plain / rope.factor + keep * plain
    low = _yarn_dimension(rope, head_dim, rope.beta_fast)
    high = _yarn_dimension(rope, head_dim, rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    stretch = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return stretch / (rope.factor * wavelengths) + (1 - stretch) * plain


def _kind(scaling: dict[str, Any]) -> RopeKind:
    fields = Config(scaling, "rope scaling")
    names = {name for key in ("rope_type", "type") if (name := fields.text(key)) is not None} or {"default"}
    if len(names) > 1:
        raise UnsupportedModel(f"rope scaling: type {scaling['type']!r} contradicts rope_type {scaling['rope_type']!r}")
    kind = names.pop()
    if kind not in _KINDS:
        raise UnsupportedModel(f"rope scaling of type {kind!r} is not supported; these are: {', '.join(_KINDS)}")
    return cast(RopeKind, kind)


def _check_fields(kind: RopeKind, scaling: dict[str, Any]) -> None:
    if kind == "default" and scaling.get("factor") == 1:
        scaling.pop("factor")
    unknown = [name for name in scaling if name not in (*_COMMON, *_FIELDS[kind])]
    if unknown:
        raise UnsupportedModel(f"rope scaling of type {kind!r} with {', '.join(unknown)} is not supported")
    if scaling.get("partial_rotary_factor", 1) != 1:
        raise UnsupportedModel("partial_rotary_factor other than 1 is not supported")


def _need(kind: RopeKind, scaling: dict[str, Any], name: str) -> float:
    if name not in scaling:
        raise UnsupportedModel(f"rope scaling of type {kind!r} lacks {name}")
    return number(name, scaling[name], above=0.0)


def _yarn_attention_factor(factor: float, scaling: dict[str, Any]) -> float:
    if "attention_factor" in scaling:
        return number("attention_factor", scaling["attention_factor"], above=0.0)

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        part, whole = (number(name, scaling[name], above=0.0) for name in ("mscale", "mscale_all_dim"))
        return mscale(part) / mscale(whole)
    return mscale(1.0)


def _yarn_dimension(rope: RopeSpec, head_dim: int, turns: float) -> float:
    """The (fractional) dimension pair that makes ``turns`` full turns in the original context."""
    return head_dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
