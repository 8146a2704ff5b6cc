"""Which quantised checkpoints can be read, by the ``quantization_config`` of their config.json."""

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.checkpoint.error import CheckpointError

Allowed = Mapping[str, tuple[Any, ...]]
"""Values that a field may have; None: it may be missing or null."""

SUPPORTED = (
    "quantised weights are read in FP8 (float8_e4m3fn) with one scale a tensor or an output channel, in the formats "
    "compressed-tensors (float-quantized) and fp8, and from GGUF files"
)

_PLAIN: Allowed = {
    "activation_scheme": ("dynamic", "static", None),
    "weight_block_size": (None,),
    "fmt": ("e4m3", "float8_e4m3fn", None),
}
_COMPRESSED: Allowed = {
    "format": ("float-quantized", "naive-quantized"),
    "transform_config": ({}, None),
}
_SPARSITY: Allowed = {"format": ("dense", None)}
_GROUP: Allowed = {"format": ("float-quantized", "naive-quantized", None), "output_activations": (None,)}
_NUMBERS: Allowed = {"num_bits": (8,), "type": ("float",), "symmetric": (True, None)}
_WEIGHTS: Allowed = {**_NUMBERS, "strategy": ("channel", "tensor"), "dynamic": (False, None)}
_INPUTS: Allowed = {**_NUMBERS, "strategy": ("token", "tensor")}


def is_fp8(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of an FP8 checkpoint.

    Lists of layers that were left alone are not read: the dtype of a layer's weight says it.

    Raises:
        CheckpointError: another kind of quantisation; says which field, and what is supported.
    """
    name = "quantization_config" if config.get("quantization_config") else "compression_config"
    stated = config.get(name)
    if not stated:
        return False
    for field in _unsupported(_object(name, stated)):
        raise CheckpointError(f"{name}: {field} is not supported; {SUPPORTED}")
    return True


def _unsupported(stated: Mapping[str, Any]) -> Iterator[str]:
    method = stated.get("quant_method")
    if method == "fp8":
        yield from _others("", stated, _PLAIN)
    elif method == "compressed-tensors":
        yield from _others("", stated, _COMPRESSED)
        yield from _others("sparsity_config.", _object("sparsity_config", stated.get("sparsity_config")), _SPARSITY)
        groups = _object("config_groups", stated.get("config_groups"))
        if not groups:
            yield "config_groups without a group"
        for name, group in groups.items():
            prefix = f"config_groups.{name}."
            group = _object(prefix[:-1], group)
            yield from _others(prefix, group, _GROUP)
            yield from _others(f"{prefix}weights.", _object(f"{prefix}weights", group.get("weights")), _WEIGHTS)
            if group.get("input_activations") is not None:
                inputs = _object(f"{prefix}input_activations", group["input_activations"])
                yield from _others(f"{prefix}input_activations.", inputs, _INPUTS)
    else:
        yield f"quant_method={method!r}"


def _others(prefix: str, fields: Mapping[str, Any], allowed: Allowed) -> Iterator[str]:
    for name, values in allowed.items():
        if fields.get(name) not in values:
            yield f"{prefix}{name}={fields.get(name)!r}"


def _object(name: str, value: Any) -> Mapping[str, Any]:
    """The object, empty where it is null."""
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f"{name} in config.json must be an object, not {value!r}")
    return value or {}
