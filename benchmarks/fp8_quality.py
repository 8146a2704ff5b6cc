"""What FP8 costs in quality: perplexity and divergence against bfloat16, same text, same weights, on a CPU.

    python benchmarks/fp8_quality.py --out benchmarks/results/fp8_quality.json

The text is teacher-forced: windows of it go through the engine's own decoder, and each position predicts the token
that stands next in the text. It is prose from the docstrings of Python's standard library, so the version of Python is
part of the result.

Variants differ in one thing each from bfloat16: float32 shows what bfloat16 itself costs, ``fp8`` is
``quantization=fp8`` (weights and tokens of the linear layers), ``fp8-kv`` rounds keys and values to FP8 as they enter
the cache, as ``kv_cache_dtype=fp8`` does on a GPU, ``fp8+fp8-kv`` is both.

Reported over all positions: perplexity; the mean and the 99th percentile of KL(bfloat16 || variant) in nats; how often
the most likely token is the same.
"""

import argparse
import ast
import json
import math
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from cpu_generate import machine
from torch import Tensor

from paceline.checkpoint.checkpoint import Checkpoint, open_checkpoint
from paceline.checkpoint.source import locate
from paceline.engine.config import Quantization
from paceline.kernels.fp8 import FP8_MAX
from paceline.layers.attention import AttentionBatch
from paceline.layers.kv_cache import KVCache
from paceline.models.decoder import Decoder
from paceline.models.loader import load_decoder

MODULES = ("decimal", "datetime", "statistics", "difflib", "doctest", "random", "pathlib", "argparse", "logging")
"""Whose docstrings are read."""
BLOCK = 16


class RoundedCache(KVCache):
    """Keys and values pass through FP8, with scale 1, on their way into the cache."""

    def write(self, layer: int, slots: Tensor, key_value: Tensor) -> None:
        rounded = key_value.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).to(key_value.dtype)
        super().write(layer, slots, rounded)


@dataclass(frozen=True)
class Variant:
    name: str
    dtype: torch.dtype = torch.bfloat16
    quantization: Quantization = "auto"
    cache: type[KVCache] = KVCache

    @property
    def weights(self) -> tuple[torch.dtype, Quantization]:
        """Variants with the same share a decoder."""
        return self.dtype, self.quantization


VARIANTS = (
    Variant("bfloat16"),
    Variant("float32", torch.float32),
    Variant("fp8", quantization="fp8"),
    Variant("fp8-kv", cache=RoundedCache),
    Variant("fp8+fp8-kv", quantization="fp8", cache=RoundedCache),
)
"""The first is what the others are compared with."""


def docstrings() -> Iterator[str]:
    """Docstrings of modules of the standard library, of 200 characters or more."""
    folder = Path(ast.__file__).parent
    for name in MODULES:
        path = folder / f"{name}.py"
        tree = ast.parse((path if path.is_file() else folder / name / "__init__.py").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                if len(text) >= 200:
                    yield text


def hidden_states(decoder: Decoder, windows: Tensor, cache_type: type[KVCache]) -> Tensor:
    """Of ``windows`` ``[W, T]``, all in one step, as ``[W, T, hidden]``."""
    count, length = windows.shape
    blocks = -(-length // BLOCK)
    groups = len(decoder.spec.kv_windows)
    cache = cache_type(decoder.kv_layout(BLOCK), [count * blocks + 1] * groups)
    tables = [torch.arange(1, count * blocks + 1).view(count, blocks)] * groups
    batch = AttentionBatch.of([length] * count, [length] * count, tables)
    return decoder.forward(windows.flatten(), batch, cache).view(count, length, -1)


@dataclass
class Figures:
    """Of one variant, by position."""

    losses: list[Tensor] = field(default_factory=list)
    divergences: list[Tensor] = field(default_factory=list)
    same: list[Tensor] = field(default_factory=list)

    def add(self, scores: Tensor, expected: Tensor, targets: Tensor) -> None:
        """Log-probabilities ``[T, vocab]`` of the variant and of the reference, and the ids that are right."""
        self.losses.append(-scores.gather(1, targets[:, None])[:, 0])
        self.divergences.append((expected.exp() * (expected - scores)).sum(-1))
        self.same.append(expected.argmax(-1) == scores.argmax(-1))

    def to_json(self) -> dict[str, float]:
        divergence = torch.cat(self.divergences)
        return {
            "perplexity": round(math.exp(torch.cat(self.losses).mean()), 4),
            "kl_mean": round(float(divergence.mean()), 6),
            "kl_p99": round(float(divergence.quantile(0.99)), 6),
            "top1_agreement": round(float(torch.cat(self.same).float().mean()), 4),
        }


def measure(checkpoint: Checkpoint, windows: Tensor) -> list[dict[str, Any]]:
    """A row for each variant."""
    decoders: dict[tuple[torch.dtype, Quantization], Decoder] = {}
    for variant in VARIANTS:
        if variant.weights not in decoders:
            decoders[variant.weights] = load_decoder(
                checkpoint, dtype=variant.dtype, device="cpu", quantization=variant.quantization
            )
    hidden = [hidden_states(decoders[variant.weights], windows, variant.cache) for variant in VARIANTS]
    figures = [Figures() for _ in VARIANTS]
    for index, window in enumerate(windows):
        expected = None
        for variant, states, found in zip(VARIANTS, hidden, figures, strict=True):
            scores = F.log_softmax(decoders[variant.weights].logits(states[index, :-1]), -1)
            expected = scores if expected is None else expected
            found.add(scores, expected, window[1:])
    return [
        {
            "variant": variant.name,
            "weights_mib": round(sum(tensor.nbytes for tensor in decoders[variant.weights].parameters()) / 2**20, 1),
            **found.to_json(),
        }
        for variant, found in zip(VARIANTS, figures, strict=True)
    ]


def commit() -> str:
    """Of the code that ran; ``+`` at its end: with changes that are not committed."""
    return _git("rev-parse", "HEAD") + ("+" if _git("status", "--porcelain", "--", "../src", __file__) else "")


def _git(*words: str) -> str:
    run = subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    return run.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="alias, folder, GGUF file or hub id")
    parser.add_argument("--text", type=Path, help="file to read instead of the docstrings")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()

    machine_before = machine()
    checkpoint = open_checkpoint(locate(options.model))
    text = options.text.read_text() if options.text else "\n\n".join(docstrings())
    ids = checkpoint.tokenizer().encode(text, add_special_tokens=False)
    needed = options.windows * options.length
    if len(ids) < needed:
        parser.error(f"the text has {len(ids)} tokens, {needed} are needed")
    windows = torch.tensor(ids[:needed]).view(options.windows, options.length)

    start = time.perf_counter()
    with torch.inference_mode():
        rows = measure(checkpoint, windows)
    seconds = round(time.perf_counter() - start, 1)
    for row in rows:
        print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    if options.out is not None:
        report = {
            "what": "perplexity, KL(bfloat16 || variant) in nats and top-1 agreement, teacher-forced",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "command": " ".join(["python", *sys.argv]),
            "model": checkpoint.name,
            "text": str(options.text or f"docstrings of {', '.join(MODULES)}"),
            "windows": options.windows,
            "window_tokens": options.length,
            "positions": options.windows * (options.length - 1),
            "machine": machine_before,
            "versions": {"python": platform.python_version()} | {name: version(name) for name in ("paceline", "torch")},
            "seconds": seconds,
            "results": rows,
        }
        options.out.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
