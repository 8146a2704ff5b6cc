"""The race on the GPU against the plain-torch sampler."""

import pytest
import torch

from paceline.engine.sampling_params import SamplingParams
from paceline.engine.step import RowStart
from paceline.kernels.sampling import sample
from paceline.kernels.triton.sampling import race
from paceline.runner.sampling_rows import sampling_batch


def reference(logits, temperature, seed, candidate, position, vocab_limit):
    starts = [
        RowStart(
            0, [0], 1, 0, [[0]], SamplingParams(temperature=float(t)), int(s), int(c), stop_ids=[], prompt_logprobs=None
        )
        for t, s, c in zip(temperature, seed, candidate, strict=True)
    ]
    batch = sampling_batch(starts, vocab_limit)
    return sample(logits.float().cpu(), batch, position.cpu().long())


def columns(rows, device, generator):
    temperature = torch.tensor([0.0, 1.0, 0.3, 2.5])[torch.arange(rows) % 4]
    seed = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    candidate = torch.arange(rows, dtype=torch.int32) % 3
    position = torch.randint(0, 100_000, (rows,), generator=generator, dtype=torch.int32)
    return [column.to(device) for column in (temperature, seed, candidate, position)]


@pytest.mark.parametrize(("rows", "width", "limit"), [(1, 77, 77), (5, 4096, 4000), (9, 9001, 8999)])
def test_tokens_equal_the_reference(device, rows, width, limit):
    """failure 29: nor is padding of the head sampled."""
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, width, generator=generator) * 3
    where = columns(rows, device, generator)
    ids, good = race(logits.to(device), *where, limit)
    expected = reference(logits, *[column.cpu() for column in where], limit)
    assert good.cpu().all()
    assert ids.cpu().tolist() == expected.ids.tolist()


def test_lowest_id_wins_among_equals(device):
    logits = torch.zeros(2, 9000)
    logits[:, [17, 40, 8000]] = 5.0
    zeros = torch.zeros(2, dtype=torch.int64, device=device)
    ids, _ = race(logits.to(device), zeros.float(), zeros, zeros, zeros, 9000)
    assert ids.cpu().tolist() == [17, 17]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_with_bad_logits_fails_alone(device, bad):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 5000, generator=generator)
    where = columns(4, device, generator)
    before, _ = race(logits.to(device), *where, 5000)
    logits[1, 4500] = bad
    ids, good = race(logits.to(device), *where, 5000)
    assert good.cpu().tolist() == [1, 0, 1, 1]
    assert [id for id, ok in zip(ids.cpu().tolist(), good.cpu().tolist(), strict=True) if ok] == [
        id for i, id in enumerate(before.cpu().tolist()) if i != 1
    ]


def test_tiny_temperatures_and_huge_logits_stay_finite(device):
    """failure 22"""
    logits = torch.tensor([[1e30, -1e30, 9e29, 0.0]], device=device)
    one = torch.ones(1, dtype=torch.int64, device=device)
    ids, good = race(logits, one.float() * 0.001, one, one, one, 4)
    assert (ids.item(), good.item()) == (0, 1)
