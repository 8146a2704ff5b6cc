"""Steps by captured pieces against the same steps launched one kernel at a time."""

import numpy as np
import pytest
import torch

from paceline.checkpoint.checkpoint import open_checkpoint
from paceline.engine.config import EngineConfig
from paceline.engine.sampling_params import SamplingParams
from paceline.engine.step import RowStart, Step
from tiny_models import make_tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BLOCK = 16


@pytest.fixture(scope="module", params=["float32", "bfloat16", "fp8"])
def runner(request, tmp_path_factory):
    from paceline.runner.gpu import GPURunner

    folder = tmp_path_factory.mktemp("llama")
    make_tiny(folder, "llama", max_position_embeddings=512, head_dim=32)
    modes = {"fp8": {"dtype": "bfloat16", "quantization": "fp8", "kv_cache_dtype": "fp8"}}
    config = EngineConfig(
        model=str(folder),
        device="cuda",
        block_size=BLOCK,
        kv_cache_bytes=1 << 28,
        **modes.get(request.param, {"dtype": request.param}),
    )
    runner = GPURunner(config, open_checkpoint(folder))
    while runner.idle():
        pass
    yield runner
    runner.close()


def row(chance, index: int, length: int, width: int = 24) -> RowStart:
    return RowStart(
        row=index,
        tokens=chance.integers(4, 200, length).tolist(),
        prompt_len=length,
        computed=0,
        blocks=[list(range(1 + index * width, 1 + (index + 1) * width))],
        params=SamplingParams(temperature=0),
        seed=0,
        candidate=0,
        stop_ids=[],
        prompt_logprobs=None,
    )


@pytest.mark.parametrize(
    ("singles", "lengths"),
    [(0, [128]), (0, [1, 127]), (5, [60, 66]), (40, [200, 2, 90]), (1, [301]), (64, [300, 300, 300]), (0, [7] * 30)],
)
@torch.inference_mode()
def test_mixed_step(runner, singles, lengths):
    """Numbers of tokens that are captured, and those in between; what the pieces write is NaN before."""
    chance = np.random.default_rng(singles + len(lengths))
    seated = [row(chance, index, int(chance.integers(2, 60))) for index in range(singles)]
    runner.submit(Step(0, added=seated, advance={each.row: len(each.tokens) - 1 for each in seated})).result()
    added = [row(chance, singles + index, length) for index, length in enumerate(lengths)]
    step = Step(1, added=added, advance={each.row: len(each.tokens) for each in added})
    runner._device_rows.extend(step)
    chunks = runner._rows.apply(step)
    samples = np.arange(len(chunks.rows))
    pieces = runner._pieces
    size = pieces.fit(len(chunks.positions))
    assert size is not None
    assert not pieces.waiting
    kept, pieces._sizes = pieces._sizes, []
    eager = runner._forward(chunks, samples)[0].clone()
    pieces._sizes = kept
    for written in (*pieces._outputs[size], pieces._attended):
        written.fill_(torch.nan)
    pieces._ids.fill_(5)
    captured = runner._forward(chunks, samples)[0]
    close = 1e-5 if eager.dtype == torch.float32 else 3e-2
    torch.testing.assert_close(captured, eager, rtol=close, atol=close)
    runner.submit(Step(2, removed=list(range(singles + len(lengths))))).result()
