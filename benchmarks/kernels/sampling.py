"""Times the sampler of the GPU: on the device (CUDA graph replays) and on the host (a call, and rows taking seats).

    python benchmarks/kernels/sampling.py [--out FILE]

Logits are bfloat16 over the vocabulary of Llama-3, normal with a deviation of 2.5; several are read in turn, from 8
rows on together larger than the L2 cache. The floor is reading them once at 4.64 TB/s, an H200's ceiling. Checks first
that tokens equal the CPU's.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from paceline.engine.sampling_params import SamplingParams
from paceline.engine.step import RowStart
from paceline.kernels.sampling import sample
from paceline.kernels.triton import sampling
from paceline.runner.device_sampler import DeviceSampler
from paceline.runner.sampling_rows import sampling_batch

VOCAB = 128_256
READ = 4.64e12
REPLAY_BYTES = 400e6
DEVIATION = 2.5
ROWS = (1, 8, 64, 256, 1024)
CHUNKS = (1024, 2048, 4096)
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "random": {},
    "top_k 20, top_p 0.8": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "the same, repetition": {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05},
    "top_p 0.95": {"top_p": 0.95},
    "top_p 0.95, warm 2": {"top_p": 0.95, "temperature": 2.0},
    "min_p 0.05": {"min_p": 0.05},
}


def starts_of(count: int, fields: dict[str, Any], length: int = 100) -> list[RowStart]:
    params = SamplingParams(max_tokens=None, **fields)
    prompts = np.random.default_rng(1).integers(0, VOCAB, (count, length)).tolist()
    return [RowStart(row, prompts[row], length, 0, [[0]], params, row * 977, 0, [], None) for row in range(count)]


def seat_tensors(starts: list[RowStart]) -> tuple[NDArray[np.int64], Tensor, Tensor]:
    rows = np.array([start.row for start in starts])
    positions = torch.tensor([len(start.tokens) for start in starts], dtype=torch.int32, device="cuda")
    return rows, torch.from_numpy(rows).int().cuda(), positions


def check() -> float:
    """Share of rows that sample the same token on the CPU."""
    starts = [
        start for fields in KINDS.values() if "repetition_penalty" not in fields for start in starts_of(8, fields)
    ]
    for row, start in enumerate(starts):
        start.row = row
    logits = (torch.randn(len(starts), VOCAB) * DEVIATION).bfloat16()
    expected = sample(logits.float(), sampling_batch(starts, VOCAB), torch.tensor([len(s.tokens) for s in starts]))
    sampler = DeviceSampler(len(starts), VOCAB, VOCAB, torch.device("cuda"))
    sampler.seat(starts)
    ids = sampler.sample(logits.cuda(), *seat_tensors(starts)).ids.cpu()
    return (ids == expected.ids).double().mean().item()


def device_us(calls: list[Callable[[], object]], replays: int = 5) -> float:
    """Median time of a call, in a CUDA graph of all of them."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def host_us(call: Callable[[], object], count: int = 20) -> float:
    """Median time until a call returns, the device being idle before it."""
    times = []
    for _ in range(count):
        torch.cuda.synchronize()
        before = time.perf_counter()
        call()
        times.append((time.perf_counter() - before) * 1e6)
    return statistics.median(times)


def measure(rows: int, kind: str) -> dict[str, Any]:
    starts = starts_of(rows, KINDS[kind])
    sampler = DeviceSampler(rows, VOCAB, VOCAB, torch.device("cuda"))
    sampler.seat(starts)
    where = seat_tensors(starts)
    copies = max(2, min(64, int(REPLAY_BYTES / (rows * VOCAB * 2))))
    logits = [
        (torch.randn(rows, VOCAB, device="cuda") * DEVIATION).bfloat16()
        for _ in range(min(copies, 2 + int(200e6 / (rows * VOCAB * 2))))
    ]
    calls = [lambda index=index: sampler.sample(logits[index % len(logits)], *where) for index in range(copies)]
    return {
        "rows": rows,
        "kind": kind,
        "chunk": sampling.CHUNK,
        "device_us": round(device_us(calls), 1),
        "floor_us": round(rows * VOCAB * 2 / READ * 1e6, 1),
        "host_us": round(host_us(calls[0]), 1),
    }


def seating_us(fields: dict[str, Any]) -> float:
    """Time on the host until 8 rows with prompts of 1,000 tokens have left and taken seats."""
    starts = starts_of(8, fields, 1000)
    sampler = DeviceSampler(8, VOCAB, VOCAB, torch.device("cuda"))

    def again() -> None:
        sampler.release([start.row for start in starts])
        sampler.seat(starts)

    again()
    return host_us(again)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    torch.manual_seed(0)
    print(f"tokens that equal the CPU's: {check():.1%}")
    results = [measure(rows, kind) for kind in KINDS for rows in ROWS]
    default = sampling.CHUNK
    for chunk in CHUNKS:
        if chunk != default:
            sampling.CHUNK = chunk
            results += [measure(rows, kind) for kind in ("greedy", "random") for rows in ROWS]
    sampling.CHUNK = default
    for kind in ("random", "the same, repetition"):
        results.append({"seating": kind, "host_us": round(seating_us(KINDS[kind]), 1)})
    if out:
        out.write_text(json.dumps(results, indent=1) + "\n")
    print(
        f"{'kind':22}{'chunk':>6}" + "".join(f"{f'{rows} rows':>18}" for rows in ROWS) + "   (device / floor / host us)"
    )
    timed = [result for result in results if "kind" in result]
    for first in range(0, len(timed), len(ROWS)):
        line = timed[first : first + len(ROWS)]
        cells = "".join(f"{r['device_us']:8.1f}{r['floor_us']:5.0f}{r['host_us']:5.0f}" for r in line)
        print(f"{line[0]['kind']:22}{line[0]['chunk']:6}{cells}")
    for result in results:
        if "seating" in result:
            print(f"8 rows take seats, {result['seating']}: {result['host_us']:.0f} us on the host")


if __name__ == "__main__":
    main()
