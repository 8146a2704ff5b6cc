"""Linear layers of few tokens, norm, activation and FP8: correctness, then time against the libraries and the ceilings.

    python benchmarks/kernels/linear.py [--out FOLDER] [--seconds 140]

Writes the fastest way of each shape as ``linear-table.json`` (the format of ``src/paceline/kernels/tables``) and all
timings as ``linear-timings.jsonl``. Shapes are those of Llama-3-8B. Times are medians of CUDA graph replays, weights
larger than the L2 cache in turn. Ceilings of an H200: 4.64 TB/s read, 670 TFLOP/s in bf16, 1240 in FP8.
"""

import argparse
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from paceline.kernels.fp8 import fp8_linear_reference, quantize_rows
from paceline.kernels.table import Choice, Cublas, GemvConfig, LinearShape, LinearTable, SkinnyConfig
from paceline.kernels.triton.activation import silu_mul, silu_mul_fp8
from paceline.kernels.triton.fp8 import fp8_linear, quantize_tokens
from paceline.kernels.triton.gemv import gemv
from paceline.kernels.triton.norm import add_rms_norm, add_rms_norm_fp8, rms_norm
from paceline.kernels.triton.skinny_linear import skinny_linear

SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (14336, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
"""Columns of the result and of the input; the weight of gate_up has twice the rows."""
LAYERS = 32
ROWS = (1, 2, 8, 16, 32, 64)
DTYPES = ("bf16", "w8a8", "w8a16")
HIDDEN, INTERMEDIATE, EPS = 4096, 14336, 1e-5
READ = 4.64e12
"""Bytes a second at which the GPU reads."""
REPLAY_BYTES = 1.6e9
SHARED_MEMORY = 227 * 1024


@dataclass(frozen=True)
class Problem:
    """One linear layer of one number of tokens."""

    name: str
    rows: int
    dtype: str

    @property
    def gated(self) -> bool:
        return self.name == "gate_up"

    @property
    def shape(self) -> LinearShape:
        n, k = SHAPES[self.name]
        return LinearShape("gate_up" if self.gated else "linear", self.rows, n, k, self.dtype)

    @property
    def padded(self) -> int:
        return max(16, self.rows)

    @property
    def weight_rows(self) -> int:
        return self.shape.n * 2 if self.gated else self.shape.n

    @property
    def weight_bytes(self) -> int:
        return self.weight_rows * self.shape.k * (2 if self.dtype == "bf16" else 1)


def candidates(problem: Problem) -> list[Choice]:
    """At most 12 configurations worth a try."""
    wide = problem.dtype != "w8a8"  # whether the matrix unit sees two bytes an element
    size = 2 if problem.dtype == "bf16" else 1
    k = problem.shape.k
    if problem.gated:
        tiles = [(64, 128, 3), (64, 128, 4), (64, 64, 5), (64, 64, 7), (128, 64, 3), (128, 64, 4)]
        tiles += [(32, 128, 4)] if problem.dtype == "bf16" else []  # too few rows for FP8 in the matrix unit
        splits: tuple[int, ...] = (1,)
    elif problem.name == "head":
        tiles, splits = [(64, 128, 4), (128, 64, 6), (128, 128, 3), (64, 64, 6)], (1,)
    else:
        tiles = [(64, 128, 4), (128, 64, 5), (64, 256, 3)]
        splits = {"qkv": (1, 2), "o": (2, 4), "down": (2, 4)}[problem.name]
    choices: list[Choice] = []
    for block_n, columns, stages in tiles:
        block_k = columns if wide else columns * 2
        shared = stages * block_k * (block_n * (2 if problem.gated else 1) * size + problem.padded * (1 + wide))
        if shared > SHARED_MEMORY:
            continue
        for split in splits:
            config = SkinnyConfig(block_n, block_k, split, stages, 8 if problem.gated and block_n == 128 else 4)
            choices.append(config)
            if columns == 128 and stages == 4:
                choices.append(replace(config, ahead=8))
    if problem.rows <= 2 and problem.dtype != "w8a8":
        more = 2 // size
        if problem.gated:
            rings = [(1, 384, 5, 4), (1, 256, 6, 4), (2, 256, 4, 8), (2, 384, 3, 4)]
            choices[-4:] = [GemvConfig(n * more, k, programs, stages, warps) for n, programs, stages, warps in rings]
        elif k == 4096:
            rings = [(4, 256, 4, 8), (2, 256, 6, 4), (2, 384, 5, 4), (1, 384, 5, 4), (2, 528, 4, 4)]
            choices[-5:] = [GemvConfig(n * more, k, programs, stages, warps) for n, programs, stages, warps in rings]
        else:
            parts = [(8, 37, 4, 4), (4, 37, 6, 8), (8, 56, 3, 4)]
            choices[-3:] = [GemvConfig(n * more, 2048, programs, stages, warps) for n, programs, stages, warps in parts]
            if problem.rows == 1:
                choices += [GemvConfig(more, 16384, 264, 4, 8), GemvConfig(more, 16384, 132, 6, 8)]
    return choices


@dataclass
class Weights:
    """Random numbers, of which every problem takes its weights in turn."""

    wide: Tensor
    narrow: Tensor
    scale: Tensor

    @classmethod
    def make(cls) -> "Weights":
        wide = torch.empty(700_000_000, dtype=torch.bfloat16, device="cuda")
        for part in wide.split(1 << 26):
            part.normal_()
        narrow = torch.empty(wide.shape, dtype=torch.float8_e4m3fn, device="cuda")
        for source, target in zip(wide.split(1 << 26), narrow.split(1 << 26), strict=True):
            target.copy_(source.float().mul_(60))
        return cls(wide, narrow, torch.rand(262_144, device="cuda") / 60 + 1e-3)

    def of(self, problem: Problem) -> tuple[list[Tensor], Tensor | None]:
        n, k = problem.weight_rows, problem.shape.k
        pool = self.wide if problem.dtype == "bf16" else self.narrow
        count = min(len(pool) // (n * k), math.ceil(REPLAY_BYTES / problem.weight_bytes))
        weights = [pool[i * n * k : (i + 1) * n * k].view(n, k) for i in range(count)]
        return weights, None if problem.dtype == "bf16" else self.scale[:n]


def operation(
    problem: Problem, choice: Choice, x: Tensor, x_scale: Tensor | None, scale: Tensor | None, pdl: bool
) -> Callable[[Tensor], Tensor]:
    """The layer as a function of its weight."""
    if isinstance(choice, GemvConfig):
        return lambda weight: gemv(x, weight, weight_scale=scale, gated=problem.gated, config=choice, pdl=pdl)
    if isinstance(choice, SkinnyConfig):
        return lambda weight: skinny_linear(
            x, weight, x_scale=x_scale, weight_scale=scale, gated=problem.gated, config=choice, pdl=pdl
        )

    def library(weight: Tensor) -> Tensor:
        if x_scale is not None and scale is not None:
            out = fp8_linear(x, x_scale, weight, scale)
        else:
            out = torch.mm(x, weight.t())
        return silu_mul(out) if problem.gated else out

    return library


def activations(problem: Problem) -> tuple[Tensor, Tensor | None]:
    x = torch.randn(problem.rows, problem.shape.k, device="cuda").to(torch.bfloat16) * problem.shape.k**-0.5
    return quantize_rows(x) if problem.dtype == "w8a8" else (x, None)


def reference(problem: Problem, x: Tensor, x_scale: Tensor | None, weight: Tensor, scale: Tensor | None) -> Tensor:
    ones = torch.ones(max(weight.shape), device="cuda")
    x_scale = ones[: len(x)] if x_scale is None else x_scale
    out = fp8_linear_reference(x, x_scale, weight, ones[: len(weight)] if scale is None else scale, None, torch.float32)
    if not problem.gated:
        return out
    gate, up = out.chunk(2, -1)
    return F.silu(gate) * up


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def seconds_of(work: Callable[[], object], replays: int = 7) -> float:
    """Median time of ``work`` in a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def compile_kernels(jobs: list[tuple[Problem, Choice]]) -> int:
    """Fills the kernel cache on disk, in a process of its own; returns how many failed."""
    failed = 0
    for problem, choice in jobs:
        dtype = torch.bfloat16 if problem.dtype == "bf16" else torch.float8_e4m3fn
        weight = torch.zeros(512, problem.shape.k, device="cuda").to(dtype)
        x, x_scale = activations(problem)
        scale = None if problem.dtype == "bf16" else torch.ones(512, device="cuda")
        try:
            operation(problem, choice, x, x_scale, scale, pdl=True)(weight)
        except Exception as error:
            print(f"does not compile: {problem} {choice}: {error!r:.150}")
            failed += 1
    return failed


def compile_all(problems: list[Problem]) -> None:
    unique: dict[tuple[object, ...], tuple[Problem, Choice]] = {}
    for problem in problems:
        for choice in candidates(problem):
            tile = replace(choice, splits=min(choice.splits, 2)) if isinstance(choice, SkinnyConfig) else choice
            tile = replace(tile, programs=problem.rows) if isinstance(tile, GemvConfig) else tile
            unique[tile, problem.padded, problem.gated, problem.dtype] = problem, choice
    jobs = list(unique.values())
    workers = max(1, min(12, (os.cpu_count() or 1) - 2))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        failed = sum(pool.map(compile_kernels, [jobs[i::workers] for i in range(workers)]))
    print(f"{len(jobs)} kernels compiled, {failed} failed")


def check_odd_sizes() -> list[str]:
    """Every kernel against its reference, in bf16, where nothing is a multiple of a tile."""
    wrong = []

    def check(name: str, actual: Tensor, expected: Tensor, limit: float = 1e-2) -> None:
        error = relative_error(actual if actual.dim() == 2 else actual.sum(0), expected)
        print(f"  {name:<42} {error:.1e}")
        if not error < limit:
            wrong.append(f"{name}: error {error:.1e}")

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda").to(torch.bfloat16)

    for width in (1000, 4096, 8191):
        x, gain, parts = normal(5, width), normal(width), torch.randn(3, 5, width, device="cuda")
        total = (x.float() + parts.sum(0)).to(torch.bfloat16)
        expected = F.rms_norm(total.float(), (width,), gain.float(), EPS)
        residual = x.clone()
        check(f"add_rms_norm {width}", add_rms_norm(parts, residual, gain, EPS), expected)
        check(f"add_rms_norm {width}: sum", residual, total)
        out, scale = add_rms_norm_fp8(parts, x.clone(), gain, EPS)
        check(f"add_rms_norm_fp8 {width}", out.float() * scale[:, None], expected, 4e-2)
    for width in (1000, 14336, 20001):
        gate_up = normal(3, 2 * width)
        gate, up = gate_up.float().chunk(2, -1)
        check(f"silu_mul {width}", silu_mul(gate_up), F.silu(gate) * up)
        out, scale = silu_mul_fp8(gate_up)
        check(f"silu_mul_fp8 {width}", out.float() * scale[:, None], F.silu(gate) * up, 4e-2)
        out, scale = quantize_tokens(gate_up)
        exact, exact_scale = quantize_rows(gate_up)
        check(f"quantize_tokens {width}", out.float() * scale[:, None], exact.float() * exact_scale[:, None], 1e-3)
    for rows, n, k in ((1, 1000, 1032), (3, 77, 2000), (17, 1000, 1032), (50, 333, 4000)):
        x, weight, bias = normal(rows, k), normal(2 * n, k), normal(2 * n)
        (x8, x8_scale), (weight8, weight8_scale) = quantize_rows(x), quantize_rows(weight)
        exact = x.float() @ weight.float().T + bias.float()
        exact16 = x.float() @ weight8.float().T * weight8_scale + bias.float()
        exact8 = fp8_linear_reference(x8, x8_scale, weight8, weight8_scale, bias, torch.float32)
        for ahead in (0, 8):
            for splits in (1, 3):
                config = SkinnyConfig(64, 128, splits, 4, 4, ahead)
                for kind, actual, expected in (
                    ("bf16", skinny_linear(x, weight, bias=bias, config=config, pdl=True), exact),
                    (
                        "w8a16",
                        skinny_linear(x, weight8, bias=bias, weight_scale=weight8_scale, config=config, pdl=True),
                        exact16,
                    ),
                    (
                        "w8a8",
                        skinny_linear(
                            x8,
                            weight8,
                            bias=bias,
                            x_scale=x8_scale,
                            weight_scale=weight8_scale,
                            config=config,
                            pdl=True,
                        ),
                        exact8,
                    ),
                ):
                    check(f"skinny {kind} {rows}x{2 * n}x{k} splits {splits} ahead {ahead}", actual, expected)
        gate, up = exact.chunk(2, -1)
        check(f"skinny gated {rows}x{n}x{k}", skinny_linear(x, weight, bias=bias, gated=True), F.silu(gate) * up)
        if rows > 4:
            continue
        check(f"gemv {rows}x{2 * n}x{k}", gemv(x, weight, bias=bias, pdl=True), exact)
        check(f"gemv fp8 {rows}x{2 * n}x{k}", gemv(x, weight8, bias=bias, weight_scale=weight8_scale), exact16)
        gain, delta, total = normal(k), torch.randn(2, rows, k, device="cuda"), torch.empty_like(x)
        summed = (x.float() + delta.sum(0)).to(torch.bfloat16)
        gate, up = (F.rms_norm(summed.float(), (k,), gain.float(), EPS) @ weight.float().T).chunk(2, -1)
        out = gemv(x, weight, norm_weight=gain, eps=EPS, delta=delta, sum_out=total, gated=True, pdl=True)
        check(f"gemv norm gated {rows}x{n}x{k}", out, F.silu(gate) * up)
        check(f"gemv norm gated {rows}x{n}x{k}: sum", total, summed)
    return wrong


def check_dependent_launch() -> list[str]:
    """A few layers in a row in one graph, with dependent launch: bit for bit the same at every replay as without.

    Each replay has another input, so that a kernel that did not wait would read what the last replay left.
    """
    wrong = []
    gain = 1 + torch.randn(HIDDEN, device="cuda").to(torch.bfloat16) / 50
    names = ("o", "gate_up", "down")
    layers = [
        {name: torch.randn(Problem(name, 1, "bf16").weight_rows, SHAPES[name][1], device="cuda") for name in names}
        for _ in range(3)
    ]
    layers = [
        {name: (weight * weight.shape[1] ** -0.5).to(torch.bfloat16) for name, weight in layer.items()}
        for layer in layers
    ]
    for rows in (1, 3, 8, 50):
        start = torch.randn(rows, HIDDEN, device="cuda")

        def run(pdl: bool, rows: int = rows, start: Tensor = start) -> Tensor:
            residual = start.clone()
            x = rms_norm(residual, gain, EPS, pdl=False)
            for layer in layers:
                ahead = SkinnyConfig(64, 128, 4, 4, 4, ahead=8)
                delta = gemv(x, layer["o"], pdl=pdl) if rows < 4 else skinny_linear(x, layer["o"], pdl=pdl)
                x = add_rms_norm(delta, residual, gain, EPS, pdl=pdl)
                if rows < 4:
                    y = gemv(x, layer["gate_up"], gated=True, pdl=pdl)
                else:
                    y = skinny_linear(x, layer["gate_up"], gated=True, pdl=pdl)
                delta = skinny_linear(y, layer["down"], config=ahead, pdl=pdl)
                x = add_rms_norm(delta, residual, gain, EPS, pdl=pdl)
            return x

        graph = torch.cuda.CUDAGraph()
        run(True)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out = run(True)
        for _ in range(20):
            start.normal_()
            expected = run(False)
            graph.replay()
            torch.cuda.synchronize()
            if not torch.equal(out, expected):
                wrong.append(f"dependent launch changes the result of {rows} rows")
                break
    print(f"  dependent launch: {'; '.join(wrong) or 'bit for bit the same'}")
    return wrong


def time_problem(problem: Problem, weights: Weights, log: list[dict[str, object]]) -> dict[Choice, float]:
    """Seconds of each correct choice; the library among them where it can do this."""
    pool, scale = weights.of(problem)
    launches = math.ceil(REPLAY_BYTES / problem.weight_bytes)
    x, x_scale = activations(problem)
    expected = reference(problem, x, x_scale, pool[0], scale)
    choices: list[Choice] = candidates(problem)
    choices += [] if problem.dtype == "w8a16" else [Cublas()]
    times = {}
    for choice in choices:
        layer = operation(problem, choice, x, x_scale, scale, pdl=True)
        entry = {**asdict(problem.shape), "name": problem.name, "method": type(choice).__name__, **asdict(choice)}
        try:
            out = layer(pool[0])
            error = relative_error(out if out.dim() == 2 else out.sum(0), expected)
            if not error < 1e-2:
                raise ArithmeticError(f"relative error {error:.1e}")

            def work(layer: Callable[[Tensor], Tensor] = layer) -> None:
                for launch in range(launches):
                    layer(pool[launch % len(pool)])

            seconds = seconds_of(work) / launches
        except Exception as failure:
            print(f"  left out: {problem} {choice}: {failure!r:.150}")
            log.append({**entry, "failure": repr(failure)[:300]})
            continue
        # The next kernel reads partial sums instead of one sum in bf16.
        extra = 0 if out.dim() == 2 else out.numel() * 4 - out[0].numel() * 2
        times[choice] = seconds + extra / READ
        log.append({**entry, "us": seconds * 1e6, "charged_us": times[choice] * 1e6, "error": error})
    return times


def time_rows() -> list[str]:
    """Norm, activation and quantisation, which move bytes only."""
    sizes = (1, 64, 2048, 8192)
    lines = [f"{'tokens':<22}" + "".join(f"{tokens:>17}" for tokens in sizes)]
    gain = torch.ones(HIDDEN, dtype=torch.bfloat16, device="cuda")
    hidden: tuple[int, ...] = (HIDDEN,)
    gate_up: tuple[int, ...] = (2 * INTERMEDIATE,)
    works: dict[str, tuple[tuple[int, ...], float, Callable[[Tensor, Tensor], object]]] = {
        # name: shape of a token's input (parts of a sum in front), bytes moved for each column of it, work
        "add_rms_norm": (hidden, 8, lambda x, r: add_rms_norm(x, r, gain, EPS, pdl=True)),
        "add_rms_norm, 4 parts": ((4, HIDDEN), 5.5, lambda x, r: add_rms_norm(x, r, gain, EPS, pdl=True)),
        "add_rms_norm_fp8": (hidden, 7, lambda x, r: add_rms_norm_fp8(x, r, gain, EPS, pdl=True)),
        "silu_mul": (gate_up, 3, lambda x, r: silu_mul(x, pdl=True)),
        "silu_mul_fp8": (gate_up, 2.5, lambda x, r: silu_mul_fp8(x, pdl=True)),
        "quantize_tokens": (hidden, 3, lambda x, r: quantize_tokens(x, pdl=True)),
    }
    for name, (shape, bytes_each, work) in works.items():
        line = f"{name:<22}"
        columns = math.prod(shape)
        for tokens in sizes:
            copies = max(2, min(16, 1_000_000_000 // (tokens * columns * 4)))
            xs = [torch.randn(*shape[:-1], tokens, shape[-1], device="cuda") for _ in range(copies)]
            if len(shape) == 1:
                xs = [x.to(torch.bfloat16) for x in xs]
            residuals = [torch.randn(tokens, HIDDEN, device="cuda").to(torch.bfloat16) for _ in xs]

            def run(
                work: Callable[[Tensor, Tensor], object] = work,
                xs: list[Tensor] = xs,
                residuals: list[Tensor] = residuals,
            ) -> None:
                for x, residual in zip(xs, residuals, strict=True):
                    work(x, residual)

            seconds = seconds_of(run) / copies
            line += f"{seconds * 1e6:8.1f} us {tokens * columns * bytes_each / seconds / 1e12:4.2f}T"
        lines.append(line)
    return lines


def time_many_tokens(weights: Weights) -> list[str]:
    """FP8 products of many tokens: one scale a row, fast and exact accumulation, and one scale a tensor."""
    lines = [f"{'TFLOP/s':<16}{'bf16':>8}{'row':>8}{'row, f32':>10}{'tensor':>8}"]
    one = torch.ones((), device="cuda")
    for rows in (256, 2048, 8192):
        for name in ("qkv", "gate_up", "down"):
            n, k = Problem(name, rows, "w8a8").weight_rows, SHAPES[name][1]
            x = torch.randn(rows, k, device="cuda").to(torch.bfloat16)
            x8, x8_scale = quantize_tokens(x)
            wide, narrow = weights.wide[: n * k].view(n, k), weights.narrow[: n * k].view(n, k)
            scale = weights.scale[:n]
            works: list[Callable[[], Tensor]] = [
                lambda x=x, w=wide: torch.mm(x, w.t()),
                lambda x=x8, s=x8_scale, w=narrow, t=scale: fp8_linear(x, s, w, t),
                lambda x=x8, s=x8_scale, w=narrow, t=scale: fp8_linear(x, s, w, t, fast_accumulation=False),
                lambda x=x8, w=narrow: torch._scaled_mm(
                    x, w.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
                ),
            ]
            rates = [2 * rows * n * k * 4 / seconds_of(lambda w=w: [w() for _ in range(4)], 3) / 1e12 for w in works]
            lines.append(f"{rows:>5} {name:<10}{rates[0]:8.0f}{rates[1]:8.0f}{rates[2]:10.0f}{rates[3]:8.0f}")
    return lines


def time_fused_norm(weights: Weights) -> list[str]:
    """One token: the norm in front of the product, in a kernel of its own and inside."""
    lines = []
    gain = torch.ones(HIDDEN, dtype=torch.bfloat16, device="cuda")
    residual = torch.randn(1, HIDDEN, device="cuda").to(torch.bfloat16)
    delta, total = torch.randn_like(residual), torch.empty_like(residual)
    for name, config in (("qkv", GemvConfig(4, 4096, 256, 4, 8)), ("gate_up", GemvConfig(1, 4096, 384, 5, 4))):
        problem = Problem(name, 1, "bf16")
        pool, _ = weights.of(problem)
        gated = problem.gated

        def inside(pool: list[Tensor] = pool, gated: bool = gated, config: GemvConfig = config) -> None:
            for w in pool:
                gemv(
                    residual,
                    w,
                    norm_weight=gain,
                    eps=EPS,
                    delta=delta,
                    sum_out=total,
                    gated=gated,
                    config=config,
                    pdl=True,
                )

        def apart(pool: list[Tensor] = pool, gated: bool = gated, config: GemvConfig = config) -> None:
            for w in pool:
                x = add_rms_norm(delta, residual, gain, EPS, pdl=True)
                gemv(x, w, gated=gated, config=config, pdl=True)

        times = [seconds_of(work) / len(pool) * 1e6 for work in (inside, apart)]
        lines.append(f"1 token, {name}: norm inside {times[0]:.1f} us, in front {times[1]:.1f} us")
    return lines


def short(choice: Choice) -> str:
    if isinstance(choice, Cublas):
        return "library"
    if isinstance(choice, GemvConfig):
        return f"gemv {choice.block_n}/{choice.block_k}x{choice.programs}/s{choice.stages}/w{choice.warps}"
    end = f"/ahead {choice.ahead}" if choice.ahead else ""
    return f"{choice.block_n}/{choice.block_k}/{choice.splits}/s{choice.stages}/w{choice.warps}{end}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for the table and the timings")
    parser.add_argument("--seconds", type=float, default=140, help="start no new shape after this time")
    args = parser.parse_args()
    begin = time.monotonic()
    problems = [Problem(name, rows, dtype) for dtype in DTYPES for rows in ROWS for name in SHAPES]
    compile_all(problems)
    print(f"[{time.monotonic() - begin:.0f} s] checks")
    torch.manual_seed(0)
    wrong = check_odd_sizes() + check_dependent_launch()
    weights = Weights.make()
    print(f"[{time.monotonic() - begin:.0f} s] timing")
    device = torch.cuda.get_device_name()
    choices: dict[LinearShape, Choice] = {}
    log: list[dict[str, object]] = []
    lines, sums = [], []
    for dtype in DTYPES:
        for rows in ROWS:
            ours_sum = best_sum = library_sum = 0.0
            for problem in (p for p in problems if (p.rows, p.dtype) == (rows, dtype)):
                if time.monotonic() - begin > args.seconds:
                    print(f"out of time before {problem}")
                    continue
                times = time_problem(problem, weights, log)
                library = times.get(Cublas(), math.nan)
                if not times.keys() - {Cublas()}:
                    wrong.append(f"no kernel works for {problem}")
                    continue
                choices[problem.shape] = min(times, key=lambda choice: times[choice])
                times.pop(Cublas(), None)
                ours = min(times, key=lambda choice: times[choice])
                rate = problem.weight_bytes / 1e12
                lines.append(
                    f"{dtype:<6}{rows:>3} {problem.name:<8}{rate / times[ours]:6.2f}{times[ours] * 1e6:8.1f}"
                    f"{rate / library:9.2f}  {short(ours)}"
                )
                count = 1 if problem.name == "head" else LAYERS
                ours_sum += times[ours] * count
                library_sum += library * count
                best_sum += min(times[ours], library if library == library else math.inf) * count
            sums.append(f"{dtype:<6}{rows:>3} {ours_sum * 1e3:8.3f} {library_sum * 1e3:8.3f} {best_sum * 1e3:8.3f}")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "linear-table.json").write_text(LinearTable(device, choices).to_json())
    (args.out / "linear-timings.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in log))
    print(f"[{time.monotonic() - begin:.0f} s] {device}, torch {torch.__version__}; ceiling {READ / 1e12} TB/s")
    print("weight   layer     TB/s      us  library  config: rows/columns/splits/stages/warps")
    print("\n".join(lines))
    print("\n".join(time_rows() + time_many_tokens(weights) + time_fused_norm(weights)))
    print("one step (ms)  ours   library  best")
    print("\n".join(sums))
    print(f"[{time.monotonic() - begin:.0f} s] " + ("; ".join(wrong) or "every result is right"))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
