"""Prefill attention by cuDNN over the paged cache, on one GPU, beside the Triton kernel and cuDNN on dense tensors.

    python benchmarks/kernels/prefill.py [--check-only] [--out FOLDER]

First correctness, then time for Llama-3-8B's heads (32 query, 8 kv, 128) and blocks of 64, bfloat16. Each way to call
cuDNN is a column; one that cuDNN refuses is named with its reason, and the rest goes on. A time is the median over
replays of a CUDA graph, or over plain launches where it cannot be captured (``*``). "host" is the time to launch one
call, "build" that of the first call of a shape less a second one. TFLOP/s count the scores that causality leaves.
Writes ``prefill-attention.json``.
"""

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from paceline.kernels.cudnn_attention import CudnnPrefill, PrefillRows
from paceline.kernels.triton.attention_prefill import prefill_attention, prefill_sdpa

Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 64
DEVICE = torch.device("cuda")
VARIANTS: dict[str, dict[str, Any]] = {
    "paged": {},
    "paged, tails kept": {"clear_tails": False},
    "paged, own kernel": {"dynamic_shapes": False},
    "padded": {"path": "padded"},
    "gathered": {"path": "gathered"},
}
LIMIT = 1e-2


@dataclass(frozen=True)
class Shape:
    """``rows`` rows of ``queries`` tokens at the end of ``context`` tokens."""

    rows: int
    queries: int
    context: int

    def __str__(self) -> str:
        return f"{self.rows} x {self.queries} of {self.context}"

    @property
    def flops(self) -> float:
        before = self.queries * (self.context - self.queries)
        return 4 * Q_HEADS * HEAD_DIM * self.rows * (before + self.queries * (self.queries + 1) / 2)


SHAPES = [
    Shape(4, 2048, 2048),
    Shape(1, 8192, 8192),
    Shape(64, 128, 128),
    Shape(1, 8192, 32768),
    Shape(1, 8192, 131072),
    Shape(1, 2048, 10240),
]


class Inputs:
    """Rows over one layer's cache as the engine lays it out, with shuffled blocks.

    Slots past the contexts and blocks that no row has are ``unowned``.
    """

    def __init__(
        self, queries: Sequence[int], contexts: Sequence[int], heads: tuple[int, int, int], block_size: int,
        dtype: torch.dtype = torch.bfloat16, unowned: float = 0.0, spare: int = 5,
    ) -> None:  # fmt: skip
        q_heads, kv_heads, head_dim = heads
        needed = [-(-context // block_size) for context in contexts]
        blocks = sum(needed) + spare + 1
        order = (torch.randperm(blocks - 1, device=DEVICE) + 1).int()
        data = torch.randn(blocks, 2, kv_heads, block_size, head_dim, device=DEVICE, dtype=dtype)
        data[0] = unowned
        data[order[sum(needed) :].long()] = unowned
        self.keys, self.values = data[:, 0], data[:, 1]
        self.table = torch.zeros(len(contexts), max(needed) + 2, dtype=torch.int32, device=DEVICE)
        for row, (count, context) in enumerate(zip(needed, contexts, strict=True)):
            self.table[row, :count], order = order[:count], order[count:]
            if context % block_size:
                data[self.table[row, count - 1].long(), :, :, context % block_size :] = unowned
        self.query = torch.randn(sum(queries), q_heads, head_dim, device=DEVICE, dtype=dtype)
        self.start = torch.tensor([0, *queries], device=DEVICE).cumsum(0).int()
        self.context = torch.tensor(contexts, dtype=torch.int32, device=DEVICE)
        self.queries, self.contexts = list(queries), list(contexts)

    def rows(self, max_context: int | None = None) -> PrefillRows:
        lens = (self.start, self.context, max(self.queries), max_context or max(self.contexts))
        return PrefillRows.of(self.table, *lens, self.keys.shape[2], self.query[0].numel())

    def cudnn(self, prefill: CudnnPrefill, out: Tensor | None = None) -> Tensor:
        return prefill.attend_rows(self.query, self.keys, self.values, self.rows(), out)

    def triton(self) -> Tensor:
        caches = (self.keys, self.values, self.table)
        return prefill_attention(self.query, *caches, self.start, self.context, max(self.queries))

    def sdpa(self) -> Tensor:
        """Torch's SDPA on gathered keys and values, in float32 with a full mask."""
        out = []
        block_size, group = self.keys.shape[2], self.query.shape[1] // self.keys.shape[1]
        parts = self.query.float().split(self.queries)
        for row, (n, context) in enumerate(zip(self.queries, self.contexts, strict=True)):
            token = torch.arange(context, device=DEVICE)
            block, slot = self.table[row, token // block_size].long(), token % block_size
            k, v = (cache[block, :, slot].float().transpose(0, 1) for cache in (self.keys, self.values))
            seen = token <= torch.arange(context - n, context, device=DEVICE)[:, None]
            k, v = (x.repeat_interleave(group, 0) for x in (k, v))
            with sdpa_kernel(SDPBackend.MATH):
                out.append(F.scaled_dot_product_attention(parts[row].transpose(0, 1), k, v, seen).transpose(0, 1))
        return torch.cat(out)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.float() - expected.float()).norm() / expected.float().norm()).item()


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


@contextmanager
def guard(variant: str) -> Iterator[None]:
    """Starts over without a variant that hangs or breaks the CUDA context; others of its errors pass."""

    def start_over(why: str) -> None:
        print(f"\n{variant} {why}: starting over without it", flush=True)
        os.execv(sys.executable, [sys.executable, *sys.argv, "--without", variant])

    timer = threading.Timer(60, start_over, ["hangs"])
    timer.start()
    try:
        yield
    except Exception as error:
        try:
            torch.cuda.synchronize()
        except Exception:
            start_over(reason(error))
        raise
    finally:
        timer.cancel()


def check(prefills: dict[str, CudnnPrefill]) -> list[dict[str, Any]]:
    """Relative errors at odd sizes; one line a variant and case."""
    queries, contexts = [1, 17, 128, 129, 300, 77], [1, 500, 128, 1000, 300, 2049]
    llama, nan = (Q_HEADS, KV_HEADS, HEAD_DIM), float("nan")
    cases: dict[str, tuple[Any, ...]] = {
        "4 fresh rows": ([128] * 4, [128] * 4, llama, 64),
        "one row": ([1111], [3333], llama, 64),
        "blocks of 64": (queries, contexts, llama, 64),
        "same plan, other lengths": ([33, 2, 1, 250, 5, 290], [34, 2000, 65, 250, 777, 1700], llama, 64),
        "blocks of 16": (queries, contexts, llama, 16),
        "blocks of 128": (queries, contexts, llama, 128),
        "a row without queries": ([*queries, 0], [*contexts, 33], llama, 64),
        "NaN in others' slots": (queries, contexts, llama, 64, torch.bfloat16, nan),
        "NaN in others' slots, blocks of 16": (queries, contexts, llama, 16, torch.bfloat16, nan),
        "float16": (queries, contexts, llama, 64, torch.float16),
        "14/2 heads of 64": (queries, contexts, (14, 2, 64), 16),
        "6/2 heads of 96": (queries, contexts, (6, 2, 96), 32),
        "8/1 heads of 256": (queries, contexts, (8, 1, 256), 64),
    }
    results = []
    for case, arguments in cases.items():
        torch.manual_seed(1)
        inputs = Inputs(*arguments)
        expected, triton = inputs.sdpa(), inputs.triton()
        print(f"{case}: Triton {relative_error(triton, expected):.1e}", end="", flush=True)
        for name, prefill in prefills.items():
            if name != "paged" and (inputs.query.dtype, *arguments[2]) != (torch.bfloat16, *llama):
                continue  # each kernel takes a second to compile
            if name == "paged, own kernel" and case not in ("one row", "blocks of 64"):
                continue
            result: dict[str, Any] = {"case": case, "variant": name}
            # Clearing tails changes the cache, so variants that see NaN get their own.
            torch.manual_seed(1)
            fresh = Inputs(*arguments)
            try:
                room = torch.full((len(fresh.query) + 300, *fresh.query.shape[1:]), 7.0, device=DEVICE)
                room = room.to(fresh.query.dtype)
                with guard(name):
                    out = fresh.cudnn(prefill, room[: len(fresh.query)])
                    again = fresh.cudnn(prefill)
                    torch.cuda.synchronize()
                result["error"] = relative_error(out, expected)
                result["error_to_triton"] = relative_error(out, triton)
                result["repeats"] = torch.equal(out, again)
                result["writes_past_rows"] = not bool((room[len(fresh.query) :] == 7).all())
                good = result["error"] < LIMIT and not result["writes_past_rows"]
                notes = ("" if result["repeats"] else " differs when repeated") + (
                    " WRITES PAST ROWS" if result["writes_past_rows"] else ""
                )
                print(f" | {name} {result['error']:.1e}{'' if good else ' FAILS'}{notes}", end="", flush=True)
            except Exception as error:
                result["refused"] = reason(error)
                print(f" | {name}: {result['refused']}", end="", flush=True)
            results.append(result)
        print()
    return results


@dataclass(frozen=True)
class Time:
    """Microseconds of one call: on the GPU, to launch it, and what the first call took beyond that."""

    gpu: float
    host: float
    build: float
    captured: bool


def measure(call: Callable[[], object], seconds: float = 0.25) -> Time:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    first = time.perf_counter()
    call()
    torch.cuda.synchronize()
    once = time.perf_counter() - first
    build = max(0.0, (first - begin) - once)
    begin = time.perf_counter()
    for _ in range(5):
        call()
    host = (time.perf_counter() - begin) / 5
    torch.cuda.synchronize()
    repeats = max(1, min(20, int(2e-3 / once)))

    def replay() -> None:
        for _ in range(repeats):
            call()

    run, captured = replay, False
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replay()
        run, captured = graph.replay, True
    except Exception as error:
        print(f"    not captured: {reason(error)}")
        torch.cuda.synchronize()
    times: list[float] = []
    run()
    stop = time.perf_counter() + seconds
    while len(times) < 5 or (time.perf_counter() < stop and len(times) < 50):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return Time(sorted(times)[len(times) // 2] * 1e3 / repeats, host * 1e6, build * 1e6, captured)


def dense(inputs: Inputs, shape: Shape) -> Callable[[], object]:
    """CuDNN through torch: on dense tensors if all is fresh, else on a copy, in two parts that are merged."""
    if shape.queries < shape.context:
        return partial(prefill_sdpa, inputs.query, inputs.keys, inputs.values, inputs.table[0], shape.context)
    query = inputs.query.view(shape.rows, shape.queries, Q_HEADS, HEAD_DIM).transpose(1, 2)
    kv_shape = (shape.rows, KV_HEADS, shape.context, HEAD_DIM)
    keys, values = (torch.randn(kv_shape, device=DEVICE, dtype=query.dtype) for _ in range(2))

    def attend() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)

    return attend


def time_all(prefills: dict[str, CudnnPrefill], without: Sequence[str]) -> list[dict[str, Any]]:
    results = []
    for shape in SHAPES:
        inputs = Inputs([shape.queries] * shape.rows, [shape.context] * shape.rows, (Q_HEADS, KV_HEADS, HEAD_DIM), 64)
        calls: dict[str, Callable[[], object]] = {"dense": dense(inputs, shape), "Triton": inputs.triton}
        rows = inputs.rows()
        layer = (inputs.query, inputs.keys, inputs.values)
        for name, prefill in prefills.items():
            calls[name] = partial(prefill.attend_rows, *layer, rows)
        # One plan for any context: what does it cost that it is built for the longest?
        if "paged" in prefills:
            calls["paged, built for 131072"] = partial(prefills["paged"].attend_rows, *layer, inputs.rows(131072))
        calls["rows prepared"] = inputs.rows
        print(f"{shape}: {shape.flops / 1e9:.0f} GFLOP")
        for name, call in calls.items():
            if name in without:
                continue
            result: dict[str, Any] = {**asdict(shape), "variant": name}
            try:
                with guard(name):
                    timed = measure(call)
                result |= {**asdict(timed), "tflops": shape.flops / timed.gpu / 1e6}
                speed = "" if name == "rows prepared" else f" {result['tflops']:4.0f} TFLOP/s"
                print(
                    f"    {name:24} {timed.gpu:9.1f} us{' ' if timed.captured else '*'}{speed:13}"
                    f"  host {timed.host:6.1f} us  build {timed.build / 1e3:7.1f} ms",
                    flush=True,
                )
            except Exception as error:
                result["refused"] = reason(error)
                print(f"    {name:24} {result['refused']}", flush=True)
            results.append(result)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check-only", action="store_true", help="leave out the times")
    parser.add_argument("--without", action="append", default=[], help="leave out a variant", metavar="VARIANT")
    parser.add_argument("--out", type=Path, help="folder for prefill-attention.json")
    arguments = parser.parse_args()
    if not CudnnPrefill.available(DEVICE):
        sys.exit("needs a GPU of compute capability 9.0 or newer and nvidia-cudnn-frontend")
    import cudnn

    begin = time.perf_counter()
    prefills = {
        name: CudnnPrefill(DEVICE, **options) for name, options in VARIANTS.items() if name not in arguments.without
    }
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": cudnn.backend_version_string(),
        "cudnn_torch": torch.backends.cudnn.version(),
        "cudnn_frontend": cudnn.__version__,
        "without": arguments.without,
    }
    print(", ".join(f"{key} {value}" for key, value in report.items()))
    report["checks"] = check(prefills)
    if not arguments.check_only:
        report["times"] = time_all(prefills, arguments.without)
    report["seconds"] = time.perf_counter() - begin
    print(f"{report['seconds']:.0f} s")
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "prefill-attention.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
