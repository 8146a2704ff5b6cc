"""Captured decode steps against the same steps launched one kernel at a time."""

import numpy as np
import pytest
import torch

from paceline.checkpoint.checkpoint import open_checkpoint
from paceline.engine.config import EngineConfig
from paceline.engine.sampling_params import SamplingParams
from paceline.engine.step import RowStart, Step
from paceline.runner.rows import Chunks
from tiny_models import make_tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CONTEXT = 40
BLOCK = 16


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def runner(request, tmp_path_factory):
    from paceline.runner.gpu import GPURunner

    folder = tmp_path_factory.mktemp("llama")
    make_tiny(folder, "llama", max_position_embeddings=256)
    config = EngineConfig(
        model=str(folder), device="cuda", dtype=request.param, block_size=BLOCK, kv_cache_bytes=1 << 28
    )
    runner = GPURunner(config, open_checkpoint(folder))
    while runner.idle():
        pass
    yield runner
    runner.close()


def starts(count: int, seed: int) -> list[RowStart]:
    """Rows 0 to count, whose contexts have different lengths."""
    chance = np.random.default_rng(seed)
    width = -(-CONTEXT // BLOCK)
    made = []
    for row in range(count):
        length = int(chance.integers(2, CONTEXT))
        blocks = list(range(1 + row * width, 1 + row * width + width))
        made.append(
            RowStart(
                row=row,
                tokens=chance.integers(4, 200, length).tolist(),
                prompt_len=length,
                computed=0,
                blocks=[blocks],
                params=SamplingParams(temperature=0),
                seed=0,
                candidate=0,
                stop_ids=[],
                prompt_logprobs=None,
            )
        )
    return made


def seat(runner, count: int, seed: int) -> Chunks:
    """Seats rows and computes all but their last tokens."""
    added = starts(count, seed)
    runner.submit(Step(0, added=added, advance={s.row: len(s.tokens) - 1 for s in added})).result()
    return runner._rows.apply(Step(1))


def poison(runner) -> None:
    """Leaves NaN in everything that the graphs write, by a replay of the largest over an embedding of NaN."""
    embedding = runner._decoder._embedding
    kept = embedding.clone()
    decodes = runner._decodes
    (size,) = max(decodes.graphs._captured)
    decodes.input[:size] = runner._device_rows.sink_row
    decodes.input[size : 2 * size] = 1
    decodes.input[2 * size : 3 * size] = 0
    embedding.fill_(torch.nan)
    hidden, logits = decodes.graphs.replay((size,))
    torch.cuda.synchronize()
    assert hidden.isnan().all()
    assert logits.isnan().all()
    embedding.copy_(kept)
    decodes._expected = np.zeros(0, np.int32)
    for keys, values in zip(runner._cache.keys, runner._cache.values, strict=True):
        keys[0].zero_()
        values[0].zero_()
    decodes._tokens.fill_(7)
    decodes._positions.fill_(3)
    decodes._lengths.fill_(5)
    for table in decodes._tables:
        table.fill_(1)


@torch.inference_mode()
def check(runner, count: int) -> None:
    chunks = seat(runner, count, seed=count)
    samples = np.arange(count)
    known = runner._rows.tokens[chunks.token_rows, chunks.positions]
    lengths = runner._rows.length[chunks.rows]
    eager = [each.clone() for each in runner._mixes.run(None, chunks, known, samples, lengths)]
    poison(runner)
    size = runner._decodes.fit(chunks)
    assert size is not None
    replayed = runner._decodes.replay(size, chunks, known, samples)
    close = 1e-5 if eager[0].dtype == torch.float32 else 3e-2
    for got, wanted in zip(replayed, eager, strict=True):
        torch.testing.assert_close(got, wanted, rtol=close, atol=close)
    runner.submit(Step(2, removed=list(range(count)))).result()


@pytest.mark.parametrize("count", range(1, 65))
def test_every_batch_to_64(runner, count):
    """failure 77: padding reads and writes nothing of anyone's."""
    check(runner, count)


def test_every_captured_size(runner):
    graphs = runner._decodes.graphs
    assert not graphs.waiting
    for (size,) in graphs._captured:
        check(runner, size)
    assert max(graphs._captured) == (1024,)


def test_rows_that_go_on_find_their_input(runner):
    """What the host takes the device's input for is what it is: with the same rows, and when some have left."""
    added = starts(5, seed=1)
    changes = [{"added": added, "advance": {s.row: len(s.tokens) for s in added}}, {}, {}, {"removed": [2]}, {}, {}]
    for step, change in enumerate(changes):
        runner.submit(Step(step, **change)).result()
        torch.cuda.synchronize()
        decodes = runner._decodes
        size = len(decodes._expected) // 3
        assert size or step == 0
        assert np.array_equal(decodes.input[: 3 * size].cpu().numpy(), decodes._expected)
    runner.submit(Step(len(changes), removed=[0, 1, 3, 4])).result()
