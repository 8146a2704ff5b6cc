"""The sampler on a GPU: nothing waits, graphs hold it, and the vocabulary is a real one."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from paceline.engine.sampling_params import SamplingParams
from paceline.engine.step import RowStart

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

VOCAB, LIMIT = 128_256, 128_003
FIELDS = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.6, "top_p": 0.95},
    {"top_p": 0.999, "temperature": 2.0},
    {"top_k": 50},
    {"top_k": 20, "top_p": 0.8, "temperature": 0.7, "repetition_penalty": 1.05},
    {"top_k": 30_000, "top_p": 0.9, "temperature": 3.0},
    {"min_p": 0.05},
    {"temperature": 0.0, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    {"logit_bias": {5: 3.0, 7: -100.0}},
    {"allowed_token_ids": tuple(range(0, VOCAB, 100)), "top_p": 0.9},
    {"min_tokens": 40, "temperature": 0.0},
]


def starts_of(rows, *, only=None, **more):
    only = only or range(len(FIELDS))
    torch.manual_seed(1)
    starts = []
    for row in range(rows):
        tokens = torch.randint(VOCAB, (20 + row % 7,)).tolist()
        params = SamplingParams(max_tokens=None, **FIELDS[only[row % len(only)]], **more)
        starts.append(RowStart(row, tokens, 16, 0, [[0]], params, row * 977 - 40, row % 3, list(range(900)), None))
    return starts


def arguments(starts):
    rows = np.array([s.row for s in starts])
    positions = torch.tensor([len(s.tokens) for s in starts], dtype=torch.int32, device="cuda")
    return rows, torch.from_numpy(rows).int().cuda(), positions


def sampler_of(starts):
    from paceline.runner.device_sampler import DeviceSampler

    sampler = DeviceSampler(len(starts), VOCAB, LIMIT, torch.device("cuda"))
    sampler.seat(starts)
    return sampler


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_tokens_equal_those_of_the_cpu():
    from paceline.kernels.penalties import TokenCounts
    from paceline.kernels.sampling import sample
    from paceline.runner.sampling_rows import sampling_batch

    starts = starts_of(36)
    logits = (torch.randn(36, VOCAB) * 2.5).bfloat16()
    counts = TokenCounts(VOCAB)
    entries = []
    for i, s in enumerate(starts):
        if s.params.penalises:
            slot = counts.acquire(s.tokens, s.prompt_len)
            entries += [(i, slot, token) for token in s.tokens]
    seen = counts.look_up(*torch.tensor(entries).T)
    positions = torch.tensor([len(s.tokens) for s in starts])
    expected = sample(logits.float(), sampling_batch(starts, LIMIT), positions, seen)
    result = sampler_of(starts).sample(logits.cuda(), *arguments(starts))
    assert result.status.tolist() == [0] * 36
    assert result.ids.tolist() == expected.ids.tolist()


def test_nothing_waits_for_the_device():
    starts = starts_of(24, logprobs=3)
    logits = torch.randn(24, VOCAB, device="cuda").bfloat16()
    where = arguments(starts)
    sampler = sampler_of(starts)
    expected = sampler.sample(logits, *where)
    sampler.release([s.row for s in starts])
    with waiting_is_an_error():
        sampler.seat(starts)
        result = sampler.sample(logits, *where)
        sampler.release([s.row for s in starts])
    assert torch.equal(result.ids, expected.ids)
    assert result.logprobs is not None
    assert expected.logprobs is not None
    assert torch.equal(result.logprobs[1].top_ids, expected.logprobs[1].top_ids)


def test_a_row_is_the_same_in_any_batch():
    """failure 26"""
    starts = starts_of(300, only=[i for i, fields in enumerate(FIELDS) if "penalty" not in str(fields)])
    logits = torch.randn(300, VOCAB, device="cuda") * 2.5
    sampler = sampler_of(starts)
    together = sampler.sample(logits, *arguments(starts)).ids
    for part in torch.randperm(300).split(37):
        some = [starts[i] for i in part]
        assert torch.equal(sampler.sample(logits[part.cuda()], *arguments(some)).ids, together[part.cuda()])


@pytest.mark.parametrize("only", [[0, 1], [0, 1, 2, 4, 7]])
def test_a_graph_holds_it(only):
    starts = starts_of(20, only=only)
    sampler = sampler_of(starts)
    rows, seats, positions = arguments(starts)
    logits = torch.randn(20, VOCAB, device="cuda").bfloat16()
    sampler.sample(logits, rows, seats, positions)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sampler.sample(logits, rows, seats, positions)
    for step in range(3):
        logits.copy_(torch.randn(20, VOCAB, device="cuda") * (step + 1))
        positions += 1
        graph.replay()
        again = sampler.sample(logits, rows, seats, positions)
        assert torch.equal(captured.ids, again.ids)
        assert captured.status.tolist() == [0] * 20
