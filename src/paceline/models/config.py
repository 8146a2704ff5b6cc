"""Reading a Hugging Face config with checks, so that no field is taken for something it is not."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.checkpoint.error import CheckpointError

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "rope_interleaved": (False,),
    "partial_rotary_factor": (1,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "attention_multiplier": (),
    "query_pre_attn_scalar": (),
    "clip_qkv": (),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
    "no_rope_layers": (),
    "attention_chunk_size": (),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
}
"""Fields that change the result and that the decoder does not compute, with the values that change nothing. A field
that is missing or null changes nothing either."""

MAX_SIZE = 2**31 - 1
MAX_NUMBER = 1e30
"""Beyond every constant of a model; products of two still fit a float."""


class UnsupportedModel(CheckpointError):
    """The config asks for an architecture or a feature that is not supported, or contradicts itself."""


class Config:
    """A config.json whose fields are checked as they are read."""

    def __init__(self, fields: Mapping[str, Any], architecture: str) -> None:
        self.fields = fields
        self.architecture = architecture

    def value(self, name: str, default: Any = None) -> Any:
        """The field, or ``default`` where it is missing or null."""
        value = self.fields.get(name)
        return default if value is None else value

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number above 0; required when ``default`` is None."""
        value = self.value(name, default)
        if value is None:
            raise UnsupportedModel(f"config.json of this {self.architecture} lacks {name}")
        return whole(name, value, 1)

    def optional_size(self, name: str, default: int) -> int | None:
        """A whole number above 0, None where the field is null, ``default`` where it is missing."""
        return None if self.fields.get(name, default) is None else self.size(name, default)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.value(name, default)
        if not isinstance(value, bool):
            raise UnsupportedModel(f"{name} must be true or false, not {value!r}")
        return value

    def names(self, name: str) -> list[str] | None:
        """A list of strings; None where the field is missing or null."""
        value = self.value(name)
        if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            raise UnsupportedModel(f"{name} must be a list of strings, not {value!r}")
        return value

    def text(self, name: str) -> str | None:
        value = self.value(name)
        if value is not None and not isinstance(value, str):
            raise UnsupportedModel(f"{name} must be a string, not {value!r}")
        return value

    def number(self, name: str, default: float, *, above: float, below: float = math.inf) -> float:
        return number(name, self.value(name, default), above=above, below=below)

    def require(self, name: str, values: Sequence[Any]) -> None:
        """Raises unless the field is missing, null or one of ``values``."""
        value = self.value(name)
        if value is None or value in values:
            return
        allowed = ", ".join(repr(value) for value in values)
        hint = f"only {allowed}" if values else "leave it out or null"
        raise UnsupportedModel(f"{name}={value!r} is not supported for {self.architecture}: {hint}")

    def require_neutral(self) -> None:
        """Raises when a field asks for something that the decoder would silently leave out."""
        for name, values in NEUTRAL.items():
            self.require(name, values)


def whole(name: str, value: Any, low: int) -> int:
    """``value``; raises UnsupportedModel when it is not a whole number from ``low`` to ``MAX_SIZE``."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= MAX_SIZE:
        raise UnsupportedModel(f"{name} must be a whole number above {low - 1}, at most {MAX_SIZE}, not {value!r}")
    return value


def number(name: str, value: Any, *, above: float = -math.inf, below: float = math.inf) -> float:
    """``value`` as a float; raises UnsupportedModel when it is not a number strictly between the bounds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnsupportedModel(f"{name} must be a number, not {value!r}")
    if not above < value < below or abs(value) > MAX_NUMBER:
        raise UnsupportedModel(f"{name} must be above {above:g} and below {min(below, MAX_NUMBER):g}, not {value!r}")
    return float(value)
