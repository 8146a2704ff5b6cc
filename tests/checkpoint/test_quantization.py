"""Which quantisations are read, and that no other is taken for one of them."""

import copy
from typing import Any

import pytest

from paceline.checkpoint.error import CheckpointError
from paceline.checkpoint.quantization import is_fp8

INPUTS: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
WEIGHTS: dict[str, Any] = {**INPUTS, "strategy": "channel", "dynamic": False, "group_size": None}
GROUP: dict[str, Any] = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": INPUTS}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": GROUP},
}
PLAIN: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}


def changed(base: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with another value at ``a.b.c``."""
    copied = copy.deepcopy(base)
    *parents, last = path.split(".")
    at = copied
    for parent in parents:
        at = at[parent]
    at[last] = value
    return copied


@pytest.mark.parametrize("stated", [None, {}])
def test_nothing_stated(stated: Any) -> None:
    assert not is_fp8({"model_type": "llama"})
    assert not is_fp8({"quantization_config": stated})


@pytest.mark.parametrize(
    "stated",
    [
        COMPRESSED,
        changed(COMPRESSED, "format", "naive-quantized"),
        changed(COMPRESSED, "sparsity_config", {"format": "dense"}),
        changed(COMPRESSED, "transform_config", {}),
        changed(COMPRESSED, "kv_cache_scheme", WEIGHTS),
        changed(COMPRESSED, "config_groups.group_1", {**GROUP, "format": "float-quantized"}),
        changed(COMPRESSED, "config_groups.group_0.weights.strategy", "tensor"),
        changed(COMPRESSED, "config_groups.group_0.input_activations", None),
        changed(COMPRESSED, "config_groups.group_0.input_activations", {**INPUTS, "strategy": "tensor"}),
        PLAIN,
        changed(PLAIN, "activation_scheme", "dynamic"),
        changed(PLAIN, "weight_block_size", None),
        changed(PLAIN, "fmt", "e4m3"),
        {"quant_method": "fp8"},
    ],
)
def test_fp8(stated: dict[str, Any]) -> None:
    assert is_fp8({"quantization_config": stated})
    assert is_fp8({"compression_config": stated}), "the name that older checkpoints use"


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        *(
            ({"quant_method": method}, f"quant_method='{method}' is not supported")
            for method in ("gptq", "awq", "bitsandbytes", "mxfp4", "modelopt", "fbgemm_fp8")
        ),
        ({"bits": 4}, "quant_method=None is not supported"),
        (changed(PLAIN, "weight_block_size", [128, 128]), r"weight_block_size=\[128, 128\] is not supported"),
        (changed(PLAIN, "fmt", "e5m2"), "fmt='e5m2' is not supported"),
        (changed(PLAIN, "activation_scheme", "block"), "activation_scheme='block' is not supported"),
        (changed(COMPRESSED, "format", "pack-quantized"), "format='pack-quantized' is not supported"),
        (changed(COMPRESSED, "format", "int-quantized"), "format='int-quantized' is not supported"),
        (changed(COMPRESSED, "format", None), "format=None is not supported"),
        (changed(COMPRESSED, "config_groups", {}), "config_groups without a group is not supported"),
        (changed(COMPRESSED, "transform_config", {"config_groups": {"R1": {}}}), "transform_config="),
        (changed(COMPRESSED, "sparsity_config", {"format": "sparse-24-bitmask"}), r"sparsity_config\.format="),
        (changed(COMPRESSED, "config_groups.group_0.format", "nvfp4-pack-quantized"), r"group_0\.format='nvfp4"),
        (changed(COMPRESSED, "config_groups.group_0.weights", None), r"group_0\.weights\.num_bits=None"),
        (changed(COMPRESSED, "config_groups.group_0.weights.num_bits", 4), r"group_0\.weights\.num_bits=4"),
        (changed(COMPRESSED, "config_groups.group_0.weights.type", "int"), r"group_0\.weights\.type='int'"),
        (changed(COMPRESSED, "config_groups.group_0.weights.type", None), r"group_0\.weights\.type=None"),
        (changed(COMPRESSED, "config_groups.group_0.weights.strategy", "block"), r"weights\.strategy='block'"),
        (changed(COMPRESSED, "config_groups.group_0.weights.strategy", "group"), r"weights\.strategy='group'"),
        (changed(COMPRESSED, "config_groups.group_0.weights.symmetric", False), r"weights\.symmetric=False"),
        (changed(COMPRESSED, "config_groups.group_0.weights.dynamic", True), r"weights\.dynamic=True"),
        (changed(COMPRESSED, "config_groups.group_0.input_activations.num_bits", 4), r"activations\.num_bits=4"),
        (changed(COMPRESSED, "config_groups.group_0.input_activations.strategy", "group"), r"activations\.strategy="),
        (changed(COMPRESSED, "config_groups.group_0.output_activations", INPUTS), r"output_activations="),
        (changed(COMPRESSED, "config_groups.group_1", changed(GROUP, "weights.num_bits", 4)), r"group_1\.weights"),
        (changed(COMPRESSED, "config_groups", ["a"]), r"config_groups in config\.json must be an object"),
        (changed(COMPRESSED, "config_groups.group_0", 5), r"config_groups\.group_0 in config\.json must be an object"),
        ("fp8", r"quantization_config in config\.json must be an object"),
    ],
)
def test_refused(stated: Any, message: str) -> None:
    """failure 71: a format whose layout is not known is refused, with what is supported."""
    with pytest.raises(CheckpointError, match=message):
        is_fp8({"quantization_config": stated})
