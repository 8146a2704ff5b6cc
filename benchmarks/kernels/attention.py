"""Attention kernels on one GPU: each against a plain reference, then speed beside the limits of memory and compute.

    PYTHONPATH=src python benchmarks/kernels/attention.py [--check-only]

Shapes are Llama-3-8B's (32 query and 8 kv heads of 128). Times are medians of CUDA graph replays over so many layers
that no cache is left in L2. TB/s counts the keys and values of the context once, TFLOP/s the scores that causality
leaves.
"""

import argparse
import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from paceline.kernels.triton.attention_decode import (
    DecodeTiles,
    DecodeWorkspace,
    decode_attention,
    num_decode_splits,
    rotary_decode_attention,
)
from paceline.kernels.triton.attention_prefill import PrefillTiles, gather_kv, prefill_attention, prefill_sdpa
from paceline.kernels.triton.rotary_cache import rotary_cache, rotary_cos_sin

READ_TBS, BF16_TFLOPS = 4.64, 670.0
"""Streaming read and bf16 matrix products, as measured on an H200."""
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
    sweep = [DecodeTiles(64, 2, 3), DecodeTiles(64, 4, 3), DecodeTiles(32, 2, 4), DecodeTiles(128, 4, 2)]
    cases = [(1, 2048), (8, 2048), (64, 2048), (256, 2048), (1, 131072)]
    for (rows, context), dtype, block_size in itertools.product(cases, (torch.bfloat16, FLOAT8), (16, 64)):
        layers = Layers(rows, context, block_size, dtype)
        rule = num_decode_splits(rows, KV_HEADS, context)
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
        default, best = (DecodeTiles.of(HEAD_DIM, dtype.itemsize), rule), min(timed, key=timed.__getitem__)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check-only", action="store_true", help="no timing")
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
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
