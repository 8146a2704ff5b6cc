"""Finds the fastest way of each linear layer of few tokens on this GPU, in the middle of whole decode steps.

    python benchmarks/tune_linear.py --out TABLE.json [--rows 1,2,8,16,32,64] [--dtypes bf16,w8a8] [--base TABLE.json]
        [--methods cublas,gemv,skinny,ring,norm]

A kernel that is fastest alone need not be so in a step, where it starts while the one before still runs. So each
candidate is timed as part of a captured step of a decoder with a few layers of the Llama-3-8B shape (2,048 tokens of
context), one layer kind after the other, starting from the table that is in use. The result has the format of
`paceline/kernels/tables`; what was not tuned is taken over from ``--base`` or from the table of this GPU. The method
``norm`` is gemv with the norm in front.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from decode_step import fill, replay_ms
from llama_shape import make_llama_shape

from paceline.checkpoint.checkpoint import open_checkpoint
from paceline.engine.config import EngineConfig
from paceline.kernels.table import (
    Choice,
    Cublas,
    GemvConfig,
    LinearShape,
    LinearTable,
    RingConfig,
    SkinnyConfig,
    load_table,
    shipped_table,
)
from paceline.layers.gpu_linear import Choices, Unnormalised
from paceline.runner.gpu import GPURunner

LAYERS = 6
CONTEXT = 2048
REPLAYS = 25
SHARED_MEMORY = 227 * 1024
SHAPES = {
    "qkv": ("linear", 6144, 4096),
    "o": ("linear", 4096, 4096),
    "gate_up": ("gate_up", 14336, 4096),
    "down": ("linear", 4096, 14336),
    "head": ("linear", 128_256, 4096),
}
MODES = {"bf16": {}, "w8a8": {"quantization": "fp8"}, "w8a16": {"quantization": "fp8"}}
WITH_NORM = [
    (1, 264, 6, 4),
    (1, 528, 4, 4),
    (2, 264, 5, 4),
    (2, 264, 4, 8),
    (1, 396, 5, 4),
    (1, 528, 4, 2),
    (1, 792, 3, 2),
]
"""Rows of the weight a step (in FP8 twice as many), programs, stages and warps of gemv with the norm in front."""
METHODS = {"cublas": Cublas, "gemv": GemvConfig, "skinny": SkinnyConfig, "ring": RingConfig}
BEFORE = {"qkv": "down", "gate_up": "o"}
"""Layers with a norm in front, and what stands before that."""


def candidates(shape: LinearShape) -> Iterator[Choice]:
    """Ways worth a try."""
    size = 2 if shape.dtype == "bf16" else 1
    gated = shape.op == "gate_up"
    yield Cublas()
    if shape.rows <= 4 and shape.dtype != "w8a8":
        more = 2 // size
        if shape.k <= 4096:
            rings = [(1, 1056, 3, 1), (1, 1584, 2, 1), (1, 792, 4, 1), (1, 1056, 3, 2), (1, 792, 4, 2), (2, 528, 4, 2)]
            rings += [(2, 528, 4, 4), (2, 384, 5, 4), (1, 528, 4, 4), (2, 384, 3, 4), (1, 384, 6, 4), (2, 264, 6, 4)]
            yield from (GemvConfig(n * more, 4096, count, stages, warps) for n, count, stages, warps in rings)
        else:
            rings = [(1, 264, 4, 8), (1, 264, 4, 4), (1, 396, 3, 4), (1, 396, 3, 8), (1, 528, 2, 4), (2, 264, 3, 8)]
            yield from (GemvConfig(n * more, 16384, count, stages, warps) for n, count, stages, warps in rings)
            if not gated:
                parts = [(4, 37, 6, 8), (8, 37, 4, 4), (4, 75, 4, 4), (2, 113, 4, 2), (2, 150, 3, 1), (4, 113, 3, 2)]
                yield from (GemvConfig(n * more, 2048, count, stages, warps) for n, count, stages, warps in parts)
    if shape.dtype == "w8a16" or shape.rows == 1:
        return
    wide = 2 if size == 1 else 1
    rings = [(64, 128, 3, 4), (64, 128, 4, 4), (64, 128, 5, 4), (64, 64, 5, 4), (64, 64, 8, 4), (64, 256, 3, 4)]
    for block_n, block_k, stages, warps in [*rings, (128, 64, 4, 8), (128, 64, 6, 8), (128, 128, 3, 8)]:
        padded = max(16, 1 << (shape.rows - 1).bit_length())
        if stages * block_k * 2 * (block_n * (2 if gated else 1) + padded) > SHARED_MEMORY:
            continue
        for split in (1,) if gated or shape.n > 20_000 else (1, 2, 4):
            if gated or shape.n > 20_000 or 60 <= -(-shape.n // block_n) * split <= 500:
                yield RingConfig(block_n, block_k * 2 // size, split, stages, warps)
    tiles = [(64, 64, 5), (64, 128, 3), (64, 128, 4), (64, 256, 3), (128, 64, 4), (128, 128, 3)]
    tiles += [(32, 128, 4)] if size == 2 else []
    splits = (1,) if gated or shape.n > 20_000 else (1, 2, 4)
    for block_n, block_k, stages in tiles:
        padded = max(16, 1 << (shape.rows - 1).bit_length())
        shared = stages * block_k * wide * (block_n * (2 if gated else 1) + padded) * size
        if shared > SHARED_MEMORY:
            continue
        for split in splits:
            programs = -(-shape.n // block_n) * split
            if not gated and shape.n <= 20_000 and not 60 <= programs <= 500:
                continue
            warps = 8 if gated and block_n == 128 else 4
            yield SkinnyConfig(block_n, block_k * wide, split, stages, warps)


class Step:
    """Decode steps of a small decoder, with choices that can be exchanged."""

    def __init__(self, dtype: str, known: dict[LinearShape, Choice]) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            folder = make_llama_shape(Path(scratch) / "llama", num_hidden_layers=LAYERS)
            config = EngineConfig(
                model=str(folder), load_format="dummy", kv_cache_share=0.3, max_num_seqs=64, **MODES[dtype]
            )
            self.runner = GPURunner(config, open_checkpoint(folder))
        decoder, layer = self.runner._decoder, self.runner._decoder._layers[0]
        self.linears = {"qkv": layer.qkv, "o": layer.o, "gate_up": layer.gate_up, "down": layer.down}
        self.linears["head"] = decoder._head
        self.methods = decoder._methods.values()
        self.known = known

    def use(self, shape: LinearShape, choice: Choice | None) -> None:
        """From now on; None: nothing is known of the shape."""
        self.known.pop(shape, None)
        if choice is not None:
            self.known[shape] = choice
        for method in self.methods:
            method.choices = Choices(LinearTable("", self.known))

    def run(self, rows: int) -> None:
        self.runner._decodes.compute(rows)

    @torch.inference_mode()
    def compile(self, rows: int, trials: list[tuple[str, LinearShape, Choice]]) -> None:
        """Compiles what the trials need, side by side; those that do not fit are found out when they are timed."""
        deltas = {}
        if rows == 1:
            for name in BEFORE.values():
                x = torch.ones(1, SHAPES[name][2], dtype=torch.bfloat16, device="cuda")
                deltas[name] = self.linears[name](x)

        def attempt(name: str, shape: LinearShape, choice: Choice) -> None:
            linear = self.linears[name]
            method = type(linear._method)(Choices(LinearTable("", {shape: choice})))
            x: Any = torch.ones(rows, shape.k, dtype=torch.bfloat16, device="cuda")
            if shape.op.startswith("norm"):
                x = Unnormalised(deltas[BEFORE[name]], x, torch.empty_like(x), x[0], 1e-5)
            call = method.gated if shape.op.endswith("gate_up") else method.apply
            try:
                with torch.inference_mode():
                    call(x, linear.weight, None)
            except Exception as error:
                print(f"  {name} {choice}: {error!r:.120}")

        with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) - 2)) as pool:
            for _ in pool.map(lambda trial: attempt(*trial), trials):
                pass
        torch.cuda.synchronize()

    def time(self, rows: int) -> float:
        """Milliseconds of a captured step."""
        return replay_ms(partial(self.run, rows), REPLAYS)


def tune(step: Step, rows: int, dtype: str, methods: set[str], say: Callable[[str], None]) -> None:
    """Replaces the choices for ``rows`` by the fastest found, one layer kind at a time."""
    fill(step.runner, rows, CONTEXT)
    names = [name for name in SHAPES if dtype == "bf16" or name != "head"]
    shapes = {name: LinearShape(SHAPES[name][0], rows, *SHAPES[name][1:], dtype) for name in names}
    kinds = tuple(METHODS[method] for method in methods if method in METHODS)
    trials = {name: [each for each in candidates(shape) if isinstance(each, kinds)] for name, shape in shapes.items()}
    fused = [name for name in BEFORE if rows == 1 and "norm" in methods]
    step.compile(rows, [(name, shapes[name], choice) for name in names for choice in trials[name]])

    def fastest(name: str, shape: LinearShape, winner: Choice | None, others: Iterable[Choice]) -> Choice | None:
        step.use(shape, winner)
        before = best = step.time(rows)
        for choice in others:
            step.use(shape, choice)
            try:
                ms = step.time(rows)
            except Exception as error:
                say(f"  left out: {name} {choice}: {error!r:.100}")
                continue
            if ms < best:
                best, winner = ms, choice
        step.use(shape, winner)
        say(f"{dtype} {rows:3d} {shape.op:12s} {name:8s} {before:.4f} -> {best:.4f} ms  {winner}")
        return winner

    for name in names:
        shape = shapes[name]
        start = Choices(LinearTable("", step.known)).of(shape.op, rows, shape.n, shape.k, dtype) or Cublas()
        rings = [each for each in trials[name] if isinstance(each, RingConfig)]
        winner = fastest(name, shape, start, [each for each in trials[name] if each not in rings])
        if rings:
            ring = fastest(name, shape, rings[0], rings[1:])
            assert isinstance(ring, RingConfig)
            fastest(name, shape, winner, [ring, replace(ring, late=True)])
    whole = [GemvConfig(n * (2 if dtype == "w8a16" else 1), 4096, *rest) for n, *rest in WITH_NORM]
    fused_shapes = {name: replace(shapes[name], op=f"norm_{shapes[name].op}") for name in fused}
    step.compile(rows, [(name, fused_shapes[name], choice) for name in fused for choice in whole])
    for name in fused:
        shape = fused_shapes[name]
        fastest(name, shape, step.known.get(shape), whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--base", type=Path)
    parser.add_argument("--rows", default="1,2,8,16,32,64")
    parser.add_argument("--dtypes", default="bf16,w8a8,w8a16")
    parser.add_argument("--methods", default=",".join((*METHODS, "norm")))
    options = parser.parse_args()
    device = torch.cuda.get_device_name()
    table = load_table(options.base) if options.base else shipped_table(device)
    known = dict(table.choices) if table else {}
    begin = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - begin:4.0f} s] {line}", file=sys.stderr, flush=True)

    for dtype in options.dtypes.split(","):
        step = Step(dtype, known)
        for rows in map(int, options.rows.split(",")):
            if (dtype == "w8a16") != (rows == 1) and dtype != "bf16":  # one token is not quantised
                continue
            tune(step, rows, dtype, set(options.methods.split(",")), say)
            options.out.write_text(LinearTable(device, known).to_json())
        step.runner.close()


if __name__ == "__main__":
    main()
