"""Time of one decode step up to the scores, replayed as a graph: no scheduler, no sampling, every row as long.

    python benchmarks/decode_step.py --mode bf16 --batches 1,8,64 [--context 2112] [--out FILE]

Shape of Llama-3-8B, random weights, random keys and values. ``--tiles`` and ``--splits`` override how decode attention
is cut, and ``--linear`` names a file with other choices for linear layers (the format of `paceline/kernels/tables`); so
a change can be tried in a whole step before it becomes the default. Several settings may be given, separated by a
slash (of files, by a colon): ``--tiles 64,2,3/32,1,2``.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from h200 import MODES
from llama_shape import make_llama_shape

from paceline.checkpoint.checkpoint import open_checkpoint
from paceline.engine.config import EngineConfig
from paceline.kernels.table import load_table, shipped_table
from paceline.kernels.triton.attention_decode import DecodeTiles
from paceline.layers import paged_attention
from paceline.layers.gpu_linear import Choices
from paceline.layers.paged_attention import decode_cut
from paceline.runner.gpu import GPURunner

REPLAYS = 60


def fill(runner: GPURunner, batch: int, context: int) -> None:
    """Rows of this length, over blocks of their own with random contents."""
    blocks = -(-context // runner.sizes.block_size)
    for layer in (*runner._cache.keys, *runner._cache.values):
        for part in layer[: batch * blocks + 1].split(4096):
            part.copy_(torch.randn(part.shape, device="cuda", dtype=torch.bfloat16))
    runner._device_rows.tables[0][:batch, :blocks] = (
        torch.randperm(batch * blocks, device="cuda").view(batch, blocks).int() + 1
    )
    runner._decodes.input[: 3 * batch] = torch.cat(
        [
            torch.arange(batch, device="cuda"),
            torch.full((batch,), context, device="cuda"),
            torch.randint(0, 100_000, (batch,), device="cuda"),
        ]
    ).int()


def replay_ms(work: Callable[[], object], replays: int) -> float:
    """Median time of what ``work`` launches, over replays of a fresh capture."""
    with torch.inference_mode():
        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
    for _ in range(5):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(one.elapsed_time(two) for one, two in pairwise(marks))


@contextmanager
def settings(tiles: str, splits: str) -> Iterator[None]:
    def cut(*heads_and_the_rest: Any, **options: Any) -> tuple[DecodeTiles, int]:
        choice, count = decode_cut(*heads_and_the_rest, **options)
        if tiles:
            numbers = [int(part) for part in tiles.split(",") if part.isdigit()]
            choice = DecodeTiles(*numbers, early="early" in tiles)
        return choice, int(splits) if splits else count

    with patch.object(paged_attention, "decode_cut", cut):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", default="bf16", choices=MODES)
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--context", type=int, default=2112)
    parser.add_argument("--tiles", default="", help="TOKENS,WARPS,STAGES[,early]; several: /")
    parser.add_argument("--splits", default="", help="several: /")
    parser.add_argument("--linear", default="", help="file of a table; several: a colon")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_llama_shape(Path(scratch) / "llama-3-8b")
        config = EngineConfig(model=str(folder), load_format="dummy", kv_cache_share=0.5, **MODES[options.mode])
        runner = GPURunner(config, open_checkpoint(folder))
        shipped = shipped_table(torch.cuda.get_device_name())
        for batch in map(int, options.batches.split(",")):
            fill(runner, batch, options.context)
            for linear in options.linear.split(":"):
                for tiles in options.tiles.split("/"):
                    for splits in options.splits.split("/"):
                        with settings(tiles, splits):
                            for method in runner._decoder._methods.values():
                                method.choices = Choices(load_table(Path(linear)) if linear else shipped)
                            try:
                                ms = replay_ms(partial(runner._decodes.compute, batch), REPLAYS)
                            except Exception as error:
                                print(f"{options.mode} {batch} {tiles} {splits} {linear}: {error!r:.200}", flush=True)
                                continue
                        row = {
                            "mode": options.mode,
                            "batch": batch,
                            "context": options.context,
                            "ms": ms,
                            "head": True,
                            "tiles": tiles,
                            "splits": splits,
                            "linear": linear,
                        }
                        rows.append(row)
                        print(
                            f"{options.mode} {batch:4d} {ms:8.4f} ms  tiles {tiles or 'default'} "
                            f"splits {splits or 'default'} linear {linear or 'default'}",
                            flush=True,
                        )
    if options.out:
        options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
