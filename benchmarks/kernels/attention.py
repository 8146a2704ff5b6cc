"""Attention kernels on one GPU: each against a plain reference, then speed beside the limits of memory and compute.

    python benchmarks/kernels/attention.py [--check-only | --decode-tuning | --prefill-tuning] [--out FOLDER]

Shapes are Llama-3-8B's (32 query and 8 kv heads of 128). Times are medians of CUDA graph replays over so many layers
that no cache is left in L2. TB/s counts the keys and values of the context once, TFLOP/s the scores that causality
leaves. ``--decode-tuning`` and ``--prefill-tuning`` compare ways to cut one kernel instead, and write
``decode-attention.json`` and ``prefill-tiles.json``.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from paceline.kernels.table import GemvConfig, LinearShape, RingConfig, SkinnyConfig, shipped_table
from paceline.kernels.triton.attention_decode import (
    DecodeTiles,
    DecodeWorkspace,
    decode_attention,
    rotary_decode_attention,
)
from paceline.kernels.triton.attention_prefill import PrefillTiles, gather_kv, prefill_attention, prefill_sdpa
from paceline.kernels.triton.gemv import gemv
from paceline.kernels.triton.ring_linear import ring_linear
from paceline.kernels.triton.rotary_cache import rotary_cache, rotary_cos_sin
from paceline.kernels.triton.skinny_linear import skinny_linear
from paceline.layers.paged_attention import decode_cut

READ_TBS, BF16_TFLOPS = 4.64, 670.0
"""Streaming read and bf16 matrix products, as measured on an H200."""
MULTIPROCESSORS = 132
Q_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
FLOAT8 = torch.float8_e4m3fn
BETWEEN_LAYERS = 256 << 20
"""Bytes of cache, at least, before a layer's are read again."""


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.float() - expected.float()).norm() / expected.float().norm()).item()


def rotated(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    cos, sin = cos_sin[positions.long()].unsqueeze(1).chunk(2, -1)
    left, right = x.float().chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


def reference(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lens: Sequence[int], contexts: Sequence[int],
    window: int | None, scales: tuple[float, float] = (1.0, 1.0),
) -> Tensor:  # fmt: skip
    """Attention with a full mask, in float32."""
    out, token = [], 0
    for row, (n, context) in enumerate(zip(lens, contexts, strict=True)):
        blocks = table[row, : -(-context // keys.shape[2])].long()
        k, v = (cache[blocks].float().transpose(0, 1).flatten(1, 2)[:, :context] for cache in (keys, values))
        k, v = (x.repeat_interleave(query.shape[1] // keys.shape[1], 0) for x in (k * scales[0], v * scales[1]))
        q = query[token : token + n].float().transpose(0, 1)
        distance = torch.arange(context - n, context, device=q.device)[:, None] - torch.arange(context, device=q.device)
        seen = (distance >= 0) & (distance < (window or context))
        scores = (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).masked_fill(~seen, float("-inf"))
        out.append((scores.softmax(-1) @ v).transpose(0, 1))
        token += n
    return torch.cat(out)


def check(device: torch.device, dtype: torch.dtype, long: int) -> list[tuple[str, float, float]]:
    """Name, relative error and limit of every kernel at odd sizes; ``long`` is the longest context."""
    torch.manual_seed(1)
    results = []
    shapes = [
        (32, 8, 128, 16, None),
        (32, 8, 128, 64, 37),
        (14, 2, 64, 32, None),
        (6, 2, 96, 16, 300),
        (4, 1, 256, 128, None),
    ]
    for (heads, kv_heads, dim, block_size, window), cache_dtype in itertools.product(shapes, (dtype, FLOAT8)):
        contexts = [1, 2, 63, 64, 65, long // 3 + 1, long]
        rows, width = len(contexts), -(-long // block_size)
        table = (torch.randperm(rows * width, device=device) + 1).int().view(rows, width)
        shape = (rows * width + 1, kv_heads, block_size, dim)
        keys, values = (torch.randn(shape, device=device, dtype=dtype).to(cache_dtype) for _ in range(2))
        scales = (0.5, 2.0) if cache_dtype == FLOAT8 else (1.0, 1.0)
        options = {"window": window, "k_scale": scales[0], "v_scale": scales[1]}
        context = torch.tensor(contexts, dtype=torch.int32, device=device)
        name = f"{heads}/{kv_heads}x{dim} block {block_size} window {window} {str(cache_dtype)[6:]}"

        query = torch.randn(rows, heads, dim, device=device, dtype=dtype)
        expected = reference(query, keys, values, table, [1] * rows, contexts, window, scales)
        for splits in (1, 5):
            out = decode_attention(query, keys, values, table, context, num_splits=splits, **options)
            results.append((f"decode, {splits} splits, {name}", relative_error(out, expected), 1e-2))

        cos_sin = rotary_cos_sin(1e4 ** (-torch.arange(0, dim, 2, device=device) / dim), long)
        parts = torch.randn(3, rows, (heads + 2 * kv_heads) * dim, device=device)
        out = rotary_decode_attention(
            parts,
            cos_sin,
            keys,
            values,
            table,
            context,
            num_splits=5,
            dtype=dtype,
            pdl=device.type == "cuda",
            **options,
        )
        qkv = parts.sum(0).view(rows, -1, dim)
        query = rotated(qkv[:, :heads], context - 1, cos_sin)
        expected = reference(query, keys, values, table, [1] * rows, contexts, window, scales)
        results.append((f"fused decode, {name}", relative_error(out, expected), 1e-2))
        block, offset = (
            table.gather(1, ((context - 1) // block_size).long()[:, None])[:, 0].long(),
            (context.long() - 1) % block_size,
        )
        limit = 4e-2 if cache_dtype == FLOAT8 else 1e-2
        written = rotated(qkv[:, heads:-kv_heads], context - 1, cos_sin)
        results.append(
            (f"keys written, {name}", relative_error(keys[block, :, offset].float() * scales[0], written), limit)
        )
        written = qkv[:, -kv_heads:]
        results.append(
            (f"values written, {name}", relative_error(values[block, :, offset].float() * scales[1], written), limit)
        )

        lens = [1, 2, 17, 64, 1, long // 4, long // 2 + 1]
        start = torch.tensor([0, *lens], device=device).cumsum(0).int()
        positions = torch.cat(
            [torch.arange(c - n, c, device=device) for n, c in zip(lens, contexts, strict=True)]
        ).int()
        qkv = torch.randn(sum(lens), (heads + 2 * kv_heads) * dim, device=device, dtype=dtype)
        row = torch.repeat_interleave(torch.tensor(lens, device=device)).int()
        query = rotary_cache(
            qkv, positions, cos_sin, keys, values, rows=row, block_table=table, k_scale=scales[0], v_scale=scales[1]
        )
        written = rotated(qkv.view(sum(lens), -1, dim)[:, :heads], positions, cos_sin)
        results.append((f"rotary, {name}", relative_error(query, written), 1e-2))
        expected = reference(query, keys, values, table, lens, contexts, window, scales)
        out = prefill_attention(query, keys, values, table, start, context, max(lens), **options)
        results.append((f"prefill, {name}", relative_error(out, expected), 1e-2))
        if window is None and dim <= 128:
            out = prefill_sdpa(query[-lens[-1] :], keys, values, table[-1], long, k_scale=scales[0], v_scale=scales[1])
            results.append((f"prefill by SDPA, {name}", relative_error(out, expected[-lens[-1] :]), 1e-2))
    return results


def microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Median time of a call, all of them captured in one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(9):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[4] * 1000 / len(calls)


class Layers:
    """Caches of enough layers for ``rows`` contexts, with random blocks."""

    def __init__(self, rows: int, context: int, block_size: int, dtype: torch.dtype) -> None:
        width = -(-context // block_size)
        shape = (rows * width + 1, KV_HEADS, block_size, HEAD_DIM)
        self.bytes = 2 * rows * context * KV_HEADS * HEAD_DIM * dtype.itemsize
        count = max(2, -(-BETWEEN_LAYERS // self.bytes))
        self.caches = [
            tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(dtype) for _ in range(2))
            for _ in range(count)
        ]
        self.table = (torch.randperm(rows * width, device="cuda") + 1).int().view(rows, width)
        self.context = torch.full((rows,), context, dtype=torch.int32, device="cuda")

    def calls(self, attend: Callable[..., object]) -> list[Callable[[], object]]:
        """One call a layer."""
        return [partial(attend, key_cache=keys, value_cache=values) for keys, values in self.caches]


def time_decode() -> list[str]:
    lines = []
    cos_sin = rotary_cos_sin(5e5 ** (-torch.arange(0, HEAD_DIM, 2, device="cuda") / HEAD_DIM), 131072)
    others = [DecodeTiles(64, 2, 3), DecodeTiles(64, 4, 3), DecodeTiles(32, 2, 4), DecodeTiles(32, 2, 4, early=True)]
    cases = [(1, 2048), (8, 2048), (64, 2048), (256, 2048), (1, 131072)]
    for (rows, context), dtype, block_size in itertools.product(cases, (torch.bfloat16, FLOAT8), (16, 64)):
        layers = Layers(rows, context, block_size, dtype)
        tiles, rule = decode_cut(rows * KV_HEADS, context, HEAD_DIM, dtype.itemsize, MULTIPROCESSORS)
        sweep = [tiles, *(other for other in others if other != tiles)]
        qkv = torch.randn(rows, (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        timed = {}
        for tiles in sweep if block_size == 16 else sweep[:1]:
            for splits in sorted({rule, max(1, rule // 2), rule * 2}) if tiles == sweep[0] else [rule]:
                attend = partial(
                    rotary_decode_attention,
                    qkv,
                    cos_sin,
                    block_table=layers.table,
                    context_len=layers.context,
                    num_splits=splits,
                    workspace=DecodeWorkspace.of(rows, Q_HEADS, KV_HEADS, HEAD_DIM, splits, "cuda"),
                    tiles=tiles,
                    pdl=True,
                )
                timed[tiles, splits] = microseconds(layers.calls(attend))
        default, best = (sweep[0], rule), min(timed, key=timed.__getitem__)
        speed = layers.bytes / timed[default] / 1e6
        line = (
            f"decode {rows:4} x {context:6} {str(dtype)[6:14]} block {block_size}: {timed[default]:8.1f} us"
            f" {speed:5.2f} TB/s ({speed / READ_TBS:4.0%}), {rule} splits; best {timed[best]:8.1f} us by"
            f" {best[0].tokens}/{best[0].warps}/{best[0].stages}, {best[1]} splits"
        )
        if block_size == 16 and dtype == torch.bfloat16:
            query = torch.randn(rows, Q_HEADS, 1, HEAD_DIM, device="cuda", dtype=dtype)
            shape = (rows, KV_HEADS, context, HEAD_DIM)
            pairs = [tuple(torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2)) for _ in range(2)]
            line += f"; torch SDPA, 2 layers {time_sdpa([(query, *pair) for pair in pairs], causal=False)}"
        print(line, flush=True)
        lines.append(line)
    return lines


def time_sdpa(layers: Sequence[tuple[Tensor, Tensor, Tensor]], causal: bool) -> str:
    """cuDNN's time, or why it has none."""
    try:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            attend = partial(F.scaled_dot_product_attention, is_causal=causal, enable_gqa=True)
            time = microseconds([partial(attend, *layer) for layer in layers])
    except RuntimeError as error:
        return f"refuses ({str(error).splitlines()[0][:60]})"
    return f"{time:.1f} us"


def time_prefill() -> list[str]:
    lines = []
    sweep = [
        PrefillTiles(128, 128, 8, 2),
        PrefillTiles(128, 64, 8, 3),
        PrefillTiles(64, 128, 4, 2),
        PrefillTiles(64, 64, 4, 3),
    ]
    cases = [(2048, 2048), (8192, 8192), (32768, 32768), (2048, 32768)]
    for (tokens, context), (dtype, block_size) in itertools.product(
        cases, ((torch.bfloat16, 16), (torch.bfloat16, 64), (torch.bfloat16, 128), (FLOAT8, 64))
    ):
        layers = Layers(1, context, block_size, dtype)
        query = torch.randn(tokens, Q_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        start = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
        flops = 4 * Q_HEADS * HEAD_DIM * (tokens * (context - tokens) + tokens * (tokens + 1) / 2)
        attend = partial(
            prefill_attention,
            query,
            block_table=layers.table,
            query_start=start,
            context_len=layers.context,
            max_query_len=tokens,
        )
        timed = {tiles: microseconds(layers.calls(partial(attend, tiles=tiles))) for tiles in sweep}
        default, best = PrefillTiles.of(HEAD_DIM, 2), min(timed, key=timed.__getitem__)
        speed = flops / timed[default] / 1e6
        line = (
            f"prefill {tokens:5} of {context:5} {str(dtype)[6:14]} block {block_size:3}: {timed[default]:9.1f} us"
            f" {speed:4.0f} TFLOP/s ({speed / BF16_TFLOPS:4.0%}); best {timed[best]:9.1f} us by"
            f" {best.queries}/{best.keys}/{best.warps}/{best.stages}"
        )
        if block_size == 64:
            whole = partial(prefill_sdpa, query, block_table=layers.table[0], context_len=context)
            copy = partial(gather_kv, block_table=layers.table[0], length=context, dtype=torch.bfloat16)
            sdpa, gather = microseconds(layers.calls(whole)), microseconds(layers.calls(copy))
            line += f"; by SDPA {sdpa:9.1f} us {flops / sdpa / 1e6:4.0f} TFLOP/s, of which gather {gather:.1f} us"
            if tokens == context and dtype == torch.bfloat16:
                shape = (1, KV_HEADS, context, HEAD_DIM)
                pair = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2))
                line += f"; cuDNN alone {time_sdpa([(query.transpose(0, 1).unsqueeze(0), *pair)], causal=True)}"
        print(line, flush=True)
        lines.append(line)
    return lines


@dataclass(frozen=True)
class Cut:
    """One way to cut decode attention."""

    tiles: DecodeTiles
    splits: int

    def __str__(self) -> str:
        early = " early" if self.tiles.early else ""
        registers = f" r{self.tiles.registers}" if self.tiles.registers else ""
        return f"{self.tiles.tokens}/{self.tiles.warps}/{self.tiles.stages} x{self.splits}{early}{registers}"


TUNED = {
    # rows, context: splits
    (1, 2048): (8, 16, 32),
    (8, 2048): (3, 4, 6, 8, 12),
    (64, 2048): (1, 2, 3, 4),
    (256, 2112): (1, 2),
    (512, 1200): (1, 2),
}


def cuts(rows: int, splits: Sequence[int], dtype: torch.dtype) -> list[Cut]:
    if dtype == FLOAT8:
        tiles = [(64, 2, 3), (64, 2, 4), (64, 4, 3), (32, 1, 2), (32, 1, 3), (32, 1, 4), (32, 2, 4), (16, 1, 4)]
        early = [(64, 4, 3, None), (32, 2, 3, None), (32, 2, 4, None), (16, 2, 5, None), (64, 4, 4, None)]
    else:
        tiles = [(64, 2, 3), (64, 2, 2), (64, 4, 2), (32, 1, 2), (32, 1, 3), (32, 2, 3), (32, 2, 4), (16, 1, 4)]
        early = [(64, 4, 3, None), (32, 2, 3, None), (32, 2, 4, None), (16, 2, 5, None), (64, 4, 2, None)]
    choices = [DecodeTiles(*cut) for cut in tiles]
    choices += [DecodeTiles(*cut, early=True, registers=most) for *cut, most in early[: None if rows <= 64 else 3]]
    return [Cut(choice, count) for choice in choices for count in splits]


class Decode:
    """Fused decode attention of Llama-3-8B in as many layers as the L2 cache cannot hold."""

    def __init__(self, rows: int, context: int, dtype: torch.dtype) -> None:
        self.rows, self.length = rows, context
        self.layers = Layers(rows, context, 64, dtype)
        self.cos_sin = rotary_cos_sin(5e5 ** (-torch.arange(0, HEAD_DIM, 2, device="cuda") / HEAD_DIM), 4096)
        self.qkv = torch.randn(rows, (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM, device="cuda").to(torch.bfloat16)
        self.sample = sorted({0, rows // 2, rows - 1})

    def attend(self, cut: Cut, pdl: bool = True) -> Callable[..., Tensor]:
        return partial(
            rotary_decode_attention,
            cos_sin=self.cos_sin,
            block_table=self.layers.table,
            context_len=self.layers.context,
            num_splits=cut.splits,
            dtype=torch.bfloat16,
            workspace=DecodeWorkspace.of(self.rows, Q_HEADS, KV_HEADS, HEAD_DIM, cut.splits, "cuda"),
            tiles=cut.tiles,
            pdl=pdl,
        )

    def newest(self, cache: Tensor) -> Tensor:
        block = self.layers.table[:, (self.length - 1) // 64].long()
        return cache[block, :, (self.length - 1) % 64]

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """The result of the sampled rows in the first layer, and the newest keys and values."""
        heads = self.qkv.view(self.rows, -1, HEAD_DIM)
        query = rotated(heads[:, :Q_HEADS], self.layers.context - 1, self.cos_sin)
        key = rotated(heads[:, Q_HEADS:-KV_HEADS], self.layers.context - 1, self.cos_sin)
        value = heads[:, -KV_HEADS:]
        keys, values = self.layers.caches[0]
        block = self.layers.table[:, (self.length - 1) // 64].long()
        for cache, new in ((keys, key), (values, value)):
            cache[block, :, (self.length - 1) % 64] = new.to(cache.dtype)
        table = self.layers.table[self.sample]
        count = len(self.sample)
        out = reference(query[self.sample], keys, values, table, [1] * count, [self.length] * count, None)
        return out, key, value

    def error(self, cut: Cut, expected: tuple[Tensor, Tensor, Tensor]) -> float:
        """Relative error of the result; ArithmeticError if it or what was written is wrong."""
        keys, values = self.layers.caches[0]
        block = self.layers.table[:, (self.length - 1) // 64].long()
        for cache in (keys, values):
            cache[block, :, (self.length - 1) % 64] = torch.zeros((), device="cuda").to(cache.dtype)
        out = self.attend(cut)(self.qkv, key_cache=keys, value_cache=values)
        error = relative_error(out[self.sample], expected[0])
        written = max(relative_error(self.newest(keys), expected[1]), relative_error(self.newest(values), expected[2]))
        if not error < 1e-2 or not written < 4e-2:
            raise ArithmeticError(f"relative error {error:.1e}, of the newest keys and values {written:.1e}")
        return error

    def time(self, cut: Cut) -> float:
        attend = partial(self.attend(cut), self.qkv)
        return microseconds(self.layers.calls(attend))

    def time_behind_linear(self, cuts: Sequence[Cut]) -> dict[Cut, tuple[float, float]]:
        """As in a model: what a call adds to the product in front of it, with and without dependent launch.

        The product of the queries, keys and values is the one of the shipped table. Its kernel may still run when that
        of attention starts, which then finds less shared memory and other multiprocessors less free than others.
        """
        width = (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM
        weights = [torch.randn(width, 4096, device="cuda").to(torch.bfloat16) / 64 for _ in range(6)]
        x = torch.randn(self.rows, 4096, device="cuda").to(torch.bfloat16)
        table = shipped_table(torch.cuda.get_device_name())
        choice = table.choose(LinearShape("linear", self.rows, width, 4096, "bf16")) if table else None
        linear: Callable[..., Tensor] = F.linear
        if isinstance(choice, GemvConfig):
            linear = partial(gemv, config=choice, pdl=True)
        elif isinstance(choice, SkinnyConfig):
            linear = partial(skinny_linear, config=replace(choice, splits=1), pdl=True)
        elif isinstance(choice, RingConfig):
            linear = partial(ring_linear, config=replace(choice, splits=1), pdl=True)
        pairs = list(zip(self.layers.caches, itertools.cycle(weights), strict=False))

        def followed(attend: Callable[..., Tensor], caches: tuple[Tensor, ...], weight: Tensor) -> None:
            attend(linear(x, weight), key_cache=caches[0], value_cache=caches[1])

        def added(cut: Cut, pdl: bool) -> float:
            attend = self.attend(cut, pdl)
            return microseconds([partial(followed, attend, caches, weight) for caches, weight in pairs]) - base

        base = microseconds([partial(linear, x, weight) for _, weight in pairs])
        return {cut: (added(cut, True), added(cut, False)) for cut in cuts}


def compile_cuts(jobs: Sequence[tuple[Cut, torch.dtype]]) -> int:
    """Fills the kernel cache on disk, in a process of its own; returns how many failed."""
    failed = 0
    for cut, dtype in jobs:
        case = Decode(2, 256, dtype)
        keys, values = case.layers.caches[0]
        try:
            for pdl in (True, False):
                case.attend(cut, pdl)(case.qkv, key_cache=keys, value_cache=values)
        except Exception as error:
            print(f"does not compile: {cut} {dtype}: {error!r:.150}")
            failed += 1
    return failed


def tune_decode(out: Path) -> bool:
    """Prints the fastest cuts of each case and writes all; whether every result was right."""
    begin = time.monotonic()
    dtypes = (torch.bfloat16, FLOAT8)
    all_cuts = ((cut, dtype) for dtype in dtypes for (rows, _), s in TUNED.items() for cut in cuts(rows, s, dtype))
    jobs = list({(Cut(cut.tiles, min(cut.splits, 2)), dtype) for cut, dtype in all_cuts})
    workers = max(1, min(14, (os.cpu_count() or 1) - 2))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        failed = sum(pool.map(compile_cuts, [jobs[i::workers] for i in range(workers)]))
    print(f"[{time.monotonic() - begin:.0f} s] {len(jobs)} kernels compiled, {failed} failed", flush=True)
    rows_of_json: list[dict[str, object]] = []
    right = failed == 0
    for ((rows, context), splits), dtype in itertools.product(TUNED.items(), dtypes):
        case = Decode(rows, context, dtype)
        expected = case.expected()
        timed: dict[Cut, float] = {}
        name = "fp8" if dtype == FLOAT8 else "bf16"
        for cut in cuts(rows, splits, dtype):
            entry = {"rows": rows, "context": context, "kv": name, **asdict(cut.tiles), "splits": cut.splits}
            try:
                error = case.error(cut, expected)
                timed[cut] = case.time(cut)
            except Exception as failure:
                print(f"  left out: {rows} x {context} {name} {cut}: {failure!r:.150}")
                rows_of_json.append({**entry, "failure": repr(failure)[:300]})
                right = False
                continue
            rows_of_json.append({**entry, "us": timed[cut], "error": error})
        if not timed:
            continue
        default = Cut(*decode_cut(rows * KV_HEADS, context, HEAD_DIM, dtype.itemsize, MULTIPROCESSORS))
        if default not in timed:
            timed[default] = case.time(default)
        best = sorted(timed, key=timed.__getitem__)
        floor = case.layers.bytes / READ_TBS / 1e6
        print(
            f"[{time.monotonic() - begin:.0f} s] {name} {rows} x {context}: floor {floor:.1f} us,"
            f" default {default} {timed[default]:.1f} us"
        )
        behind: dict[Cut, tuple[float, float]] = {}
        if rows <= 64:
            near = [cut for cut in best if timed[cut] < 1.15 * timed[best[0]]]
            behind = case.time_behind_linear(list(dict.fromkeys([*near[:12], default])))
        for cut in dict.fromkeys([*sorted(behind, key=lambda cut: min(behind[cut])), *best[:6]]):
            line = f"    {cut!s:<22}{timed[cut]:8.1f} us {case.layers.bytes / timed[cut] / 1e6:6.2f} TB/s"
            if cut in behind:
                line += (
                    f", behind the product {behind[cut][0]:.1f} us, without dependent launch {behind[cut][1]:.1f} us"
                )
            print(line, flush=True)
        for entry in rows_of_json:
            for cut, (with_pdl, without) in behind.items():
                key = {"rows": rows, "context": context, "kv": name, **asdict(cut.tiles), "splits": cut.splits}
                if entry.items() >= key.items():
                    entry.update(behind_us=with_pdl, behind_without_pdl_us=without)
        del case, expected
        torch.cuda.empty_cache()
    out.mkdir(parents=True, exist_ok=True)
    result = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "timings": rows_of_json}
    (out / "decode-attention.json").write_text(json.dumps(result, indent=1))
    print(f"[{time.monotonic() - begin:.0f} s] " + ("every result is right" if right else "SOMETHING IS WRONG"))
    return right


PREFILL_CASES = [
    # rows, tokens and context of each
    (4, 2048, 2048),
    (1, 8192, 8192),
    (1, 8192, 32768),
    (64, 128, 128),
]


def prefill_tiles() -> list[PrefillTiles]:
    tiles = [(128, 128, 8, 2), (128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 32, 4, 3), (64, 128, 4, 2)]
    limited = [(128, 64, 8, 2, 128), (128, 32, 8, 3, 128), (128, 64, 8, 3, 168), (64, 64, 4, 2, 168)]
    return [PrefillTiles(*cut) for cut in tiles] + [PrefillTiles(*cut) for cut in limited]


class Prefill:
    """Prompts of Llama-3-8B, rows of one length."""

    def __init__(self, rows: int, tokens: int, context: int, dtype: torch.dtype) -> None:
        self.layers = Layers(rows, context, 64, dtype)
        self.lens, self.contexts = [tokens] * rows, [context] * rows
        self.query = torch.randn(rows * tokens, Q_HEADS, HEAD_DIM, device="cuda").to(torch.bfloat16)
        self.attend = partial(
            prefill_attention,
            self.query,
            block_table=self.layers.table,
            query_start=torch.arange(0, rows * tokens + 1, tokens, device="cuda").int(),
            context_len=self.layers.context,
            max_query_len=tokens,
        )

    def error(self, tiles: PrefillTiles) -> float:
        keys, values = self.layers.caches[0]
        out = self.attend(key_cache=keys, value_cache=values, tiles=tiles)
        expected = reference(self.query, keys, values, self.layers.table, self.lens, self.contexts, None)
        return relative_error(out, expected)


def check_prefill(jobs: Sequence[tuple[PrefillTiles, torch.dtype]]) -> list[str]:
    """Fills the kernel cache on disk, in a process of its own; returns what is wrong."""
    wrong = []
    for tiles, dtype in jobs:
        try:
            error = Prefill(2, 333, 1000, dtype).error(tiles)
            if not error < 1e-2:
                raise ArithmeticError(f"relative error {error:.1e}")
        except Exception as failure:
            wrong.append(f"{tiles} {dtype}: {failure!r:.150}")
    return wrong


def tune_prefill(out: Path) -> bool:
    """Prints the tiles of each case, fastest first, and writes all; whether every result was right."""
    begin = time.monotonic()
    dtypes = (torch.bfloat16, FLOAT8)
    jobs = list(itertools.product(prefill_tiles(), dtypes))
    workers = max(1, min(10, (os.cpu_count() or 1) - 2))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        wrong = list(itertools.chain(*pool.map(check_prefill, [jobs[i::workers] for i in range(workers)])))
    print(f"[{time.monotonic() - begin:.0f} s] {len(jobs)} kernels, {len(wrong)} wrong", *wrong, sep="\n  ", flush=True)
    timings: list[dict[str, object]] = []
    for (rows, tokens, context), dtype in itertools.product(PREFILL_CASES, dtypes):
        case = Prefill(rows, tokens, context, dtype)
        flops = 4 * Q_HEADS * HEAD_DIM * rows * (tokens * (context - tokens) + tokens * (tokens + 1) / 2)
        timed: dict[PrefillTiles, float] = {}
        for tiles in prefill_tiles():
            try:
                timed[tiles] = microseconds(case.layers.calls(partial(case.attend, tiles=tiles)))
            except Exception as failure:
                print(f"  left out: {tiles}: {failure!r:.150}")
        name = "fp8" if dtype == FLOAT8 else "bf16"
        print(f"[{time.monotonic() - begin:.0f} s] {name} {rows} rows, {tokens} of {context} tokens")
        for tiles, us in sorted(timed.items(), key=lambda item: item[1]):
            cut = f"{tiles.queries}/{tiles.keys}/{tiles.warps}/{tiles.stages}"
            cut += f" r{tiles.registers}" if tiles.registers else ""
            print(f"    {cut:<20}{us:10.1f} us {flops / us / 1e6:6.0f} TFLOP/s", flush=True)
            timings.append({"rows": rows, "tokens": tokens, "context": context, "kv": name, **asdict(tiles), "us": us})
        del case
        torch.cuda.empty_cache()
    out.mkdir(parents=True, exist_ok=True)
    result = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "timings": timings}
    (out / "prefill-tiles.json").write_text(json.dumps(result, indent=1))
    return not wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check-only", action="store_true", help="no timing")
    mode.add_argument("--decode-tuning", action="store_true", help="compare ways to cut decode attention")
    mode.add_argument("--prefill-tuning", action="store_true", help="compare ways to cut prefill attention")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for what tuning writes")
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if arguments.decode_tuning:
        raise SystemExit(not tune_decode(arguments.out))
    if arguments.prefill_tuning:
        raise SystemExit(not tune_prefill(arguments.out))
    results = check(
        torch.device("cuda" if on_gpu else "cpu"), torch.bfloat16 if on_gpu else torch.float16, 1001 if on_gpu else 131
    )
    failed = [result for result in results if not result[1] < result[2]]
    for name, error, limit in failed:
        print(f"FAILED {name}: relative error {error:.2e}, at most {limit:.0e}")
    lines = [f"{len(results)} checks, {len(failed)} failed, largest error {max(error for _, error, _ in results):.1e}"]
    if on_gpu and not arguments.check_only:
        lines += time_decode() + time_prefill()
    print("\nSummary")
    print("\n".join(lines))
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
