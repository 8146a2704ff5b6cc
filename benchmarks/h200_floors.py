"""What the Llama-3-8B shape takes at least on an H200, by `results/h200-ceilings.jsonl`, measured with torch alone."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from llama_shape import CONFIG, VOCABULARY

CEILINGS = Path(__file__).parent / "results" / "h200-ceilings.jsonl"
LAYERS: int = CONFIG["num_hidden_layers"]
HIDDEN: int = CONFIG["hidden_size"]
FFN: int = CONFIG["intermediate_size"]
HEADS: int = CONFIG["num_attention_heads"]
KV_HEADS: int = CONFIG["num_key_value_heads"]
HEAD_DIM: int = CONFIG["head_dim"]
LINEAR = LAYERS * HIDDEN * ((HEADS + 2 * KV_HEADS) * HEAD_DIM + HEADS * HEAD_DIM + 3 * FFN)
"""Weights of the layers."""
HEAD = HIDDEN * VOCABULARY
"""Weights of the head, which stay in 16 bits."""
GEMM_TOKENS = 8192
"""Of the measured matrix products that are taken for prompts."""


@cache
def ceilings() -> list[dict[str, Any]]:
    return [json.loads(line) for line in CEILINGS.read_text().splitlines()]


def read_bytes_per_s() -> float:
    """Of the fastest streaming read."""
    return 1e12 * max(float(row["triton_read_TBs"]) for row in ceilings() if "triton_read_TBs" in row)


def decode_floor_s(mode: str, context: int) -> float:
    """Of one step of one row: to read all weights, and the keys and values of ``context`` tokens, once."""
    weights = LINEAR * (2 if mode == "bf16" else 1) + HEAD * 2
    kv_token = 2 * LAYERS * KV_HEADS * HEAD_DIM * (1 if mode == "fp8kv" else 2)
    return (weights + context * kv_token) / read_bytes_per_s()


def gemm_s(mode: str, tokens: int) -> float:
    """Of the linear layers by cuBLAS for a prompt."""
    kind = "bf16" if mode == "bf16" else "fp8_tensorwise"
    row = next(row for row in ceilings() if row.get("gemm") == kind and row["M"] == GEMM_TOKENS)
    milliseconds = sum(float(row[layer]) for layer in ("qkv", "o", "gate_up", "down"))
    return 1e-3 * milliseconds * tokens / GEMM_TOKENS


def attention_s(tokens: int) -> float:
    """Of causal attention by cuDNN in bf16 for a prompt, at the rate of the longest that was measured."""
    rows = [row for row in ceilings() if row.get("sdpa") == "CUDNN_ATTENTION"]
    rate = 1e12 * float(max(rows, key=lambda row: int(row["S"]))["TFLOPs"])
    return 4 * HEADS * HEAD_DIM * LAYERS * (tokens * (tokens + 1) / 2) / rate
