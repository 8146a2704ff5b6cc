"""Turns a tiny folder into an FP8 checkpoint, as the tools that write them would."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

Scheme = Literal["channel", "tensor"]

FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}


def compressed_tensors(scheme: Scheme = "channel", *, static: bool = False) -> dict[str, Any]:
    """A ``quantization_config`` as llm-compressor writes it, but for the list of ignored layers."""
    inputs = {**FLOAT, "strategy": "tensor" if static else "token", "dynamic": not static, "group_size": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": 1.5,
        "kv_cache_scheme": None,
        "sparsity_config": {"format": "dense", "registry_requires_subclass": False},
        "transform_config": {},
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**FLOAT, "strategy": scheme, "dynamic": False, "group_size": None, "observer": "minmax"},
                "input_activations": inputs,
                "output_activations": None,
            }
        },
    }


def plain_fp8(*, static: bool = False) -> dict[str, Any]:
    """A ``quantization_config`` of the plain format, but for the list of ignored layers."""
    return {"quant_method": "fp8", "activation_scheme": "static" if static else "dynamic"}


def one_number(weight: Tensor) -> Tensor:
    return weight.abs().max() / 448


def a_column(weight: Tensor) -> Tensor:
    return weight.abs().amax(1, keepdim=True) / 448


SCALES: dict[str, Callable[[Tensor], Tensor]] = {
    "channel [out, 1]": a_column,
    "channel [out]": lambda weight: a_column(weight)[:, 0],
    "channel bf16": lambda weight: a_column(weight).to(torch.bfloat16),
    "tensor []": one_number,
    "tensor [1]": lambda weight: one_number(weight)[None],
    "tensor [1, 1]": lambda weight: one_number(weight)[None, None],
}

KV_NAMES = {
    "compressed-tensors": ("self_attn.k_scale", "self_attn.v_scale"),
    "queries too": ("self_attn.q_scale", "self_attn.k_scale", "self_attn.v_scale"),
    "one for both": ("self_attn.kv_scale",),
    "modelopt": ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    "outputs": ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
}
"""What scales of a layer's KV cache are called."""


def rewrite(folder: Path, tensors: dict[str, Tensor | None]) -> None:
    """Replaces or adds tensors of a folder; None drops one."""
    path = folder / "model.safetensors"
    both = {**load_file(path), **tensors}
    save_file({name: tensor for name, tensor in both.items() if tensor is not None}, path, {"format": "pt"})


def quantise_folder(
    folder: Path,
    config: dict[str, Any],
    scale_of: Callable[[Tensor], Tensor],
    *,
    ignored: Sequence[str] = ("lm_head",),
    static: bool = False,
    scale_name: str = "weight_scale",
    input_scale_name: str = "input_scale",
    add: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Rewrites config.json and the weights of linear layers.

    Args:
        config: the ``quantization_config``.
        ignored: patterns of modules that stay as they are.
        add: more tensors.

    Returns:
        Every weight of the model in float32, dequantised.
    """
    tensors = load_file(folder / "model.safetensors")
    stored, meant = dict(add or {}), {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        linear = tensor.dim() == 2 and "embed_tokens" not in name
        if not linear or any(re.fullmatch(pattern, module) for pattern in ignored):
            stored[name], meant[name] = tensor, tensor.float()
            continue
        scale = scale_of(tensor)
        rows = scale.float().reshape(-1, 1)
        stored[name] = (tensor.float() / rows).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored[f"{module}.{scale_name}"] = scale.contiguous()
        if static:
            stored[f"{module}.{input_scale_name}"] = torch.tensor(0.02)
        meant[name] = stored[name].float() * rows
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    key = "ignore" if config.get("quant_method") == "compressed-tensors" else "ignored_layers"
    fields["quantization_config"] = {**config, key: list(ignored)}
    (folder / "config.json").write_text(json.dumps(fields))
    return meant


def quantise_inputs(model: nn.Module, modules: Sequence[str]) -> None:
    """Makes these linear layers round what comes in to FP8, one scale a token."""

    def rounded(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        scale = inputs[0].abs().amax(-1, keepdim=True) / 448
        return ((inputs[0] / scale).to(torch.float8_e4m3fn).float() * scale,)

    for name in modules:
        model.get_submodule(name).register_forward_pre_hook(rounded)
