"""Captured steps with rows of several tokens against the same steps launched one kernel at a time."""

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


def row(chance, index: int, length: int, width: int = 20) -> RowStart:
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


def poison(runner, shape) -> None:
    """Leaves NaN in everything that graphs write: replays a step of nothing but padding over an embedding of NaN."""
    embedding = runner._decoder._embedding
    kept = embedding.clone()
    embedding.fill_(torch.nan)
    mixes = runner._mixes
    for largest in {max(mixes.graphs._captured), shape}:
        mixes.clear(*largest)
        (hidden,) = mixes.graphs.replay(largest)
        torch.cuda.synchronize()
        assert hidden.isnan().all()
    embedding.copy_(kept)
    for keys, values in zip(runner._cache.keys, runner._cache.values, strict=True):
        keys[0].zero_()
        values[0].zero_()
    mixes._input.fill_(1)


@pytest.mark.parametrize(
    ("singles", "lengths"),
    [
        (0, [128]),
        (0, [1, 127]),
        (5, [60, 66]),
        (16, [30]),
        (17, [100, 3, 3, 3, 3, 3, 3]),
        (40, [200, 2, 90]),
        (1, [301]),
        (64, [300, 90]),
        (65, [300]),
        (100, [2]),
        (256, [250]),
    ],
)
@torch.inference_mode()
def test_mixed_step(runner, singles, lengths):
    chance = np.random.default_rng(singles + len(lengths))
    seated = [row(chance, index, int(chance.integers(2, 60))) for index in range(singles)]
    if seated:
        runner.submit(Step(0, added=seated, advance={each.row: len(each.tokens) - 1 for each in seated})).result()
    added = [row(chance, singles + index, length) for index, length in enumerate(lengths)]
    step = Step(1, added=added, advance={each.row: len(each.tokens) for each in added})
    runner._device_rows.extend(step)
    chunks = runner._rows.apply(step)
    samples = np.arange(len(chunks.rows))
    mixes = runner._mixes
    assert not mixes.graphs.waiting
    shape = mixes.fit(chunks)
    assert shape is not None
    given = (
        chunks,
        runner._rows.tokens[chunks.token_rows, chunks.positions],
        samples,
        runner._rows.length[chunks.rows],
    )
    eager = [each.clone() for each in mixes.run(None, *given)]
    poison(runner, shape)
    captured = list(mixes.run(shape, *given))
    captured[0] = captured[0][: len(chunks.positions)]
    if runner.kv_layout.dtype == torch.float8_e4m3fn:
        # What differs by rounding may round to another FP8 number in the next layer.
        for got, wanted in zip(captured[:2], eager[:2], strict=True):
            assert torch.linalg.norm((got - wanted).float()) < 0.1 * torch.linalg.norm(wanted.float())
    else:
        close = 1e-5 if eager[0].dtype == torch.float32 else 3e-2
        for got, wanted in zip(captured[:2], eager[:2], strict=True):
            torch.testing.assert_close(got, wanted, rtol=close, atol=close)
    assert all(torch.equal(got, wanted) for got, wanted in zip(captured[2:], eager[2:], strict=True))
    runner.submit(Step(2, removed=list(range(singles + len(lengths))))).result()
