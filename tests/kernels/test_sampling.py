"""The sampler, through the tensors that the runner builds for it, against a naive reference in float64."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.engine.sampling_params import SamplingParams
from paceline.engine.step import RowStart
from paceline.kernels.penalties import SeenTokens, TokenCounts, penalise
from paceline.kernels.philox import stream_keys
from paceline.kernels.race import log_waiting_times
from paceline.kernels.sampling import CANDIDATES, Sampled, sample
from paceline.runner.sampling_rows import sampling_batch

INF = math.inf


@pytest.fixture(autouse=True)
def threads(request) -> Iterator[None]:
    """One thread, or what the test asks for: several only wait for each other on small tensors."""
    before = torch.get_num_threads()
    torch.set_num_threads(getattr(request, "param", 1))
    yield
    torch.set_num_threads(before)


def start(tokens: Sequence[int] = (0,), prompt_len: int = 1, stop_ids: Sequence[int] = (), **fields) -> RowStart:
    seed = fields.pop("seed", 0)
    return RowStart(
        row=0,
        tokens=list(tokens),
        prompt_len=prompt_len,
        computed=0,
        blocks=[],
        params=SamplingParams(max_tokens=None, **fields),
        seed=seed,
        candidate=0,
        stop_ids=list(stop_ids),
        prompt_logprobs=None,
    )


def run(
    logits: Tensor, starts: Sequence[RowStart], vocab_limit: int | None = None, positions: Sequence[int] | None = None
) -> Sampled:
    batch = sampling_batch(starts, vocab_limit or logits.shape[1])
    lengths = positions if positions is not None else [len(s.tokens) for s in starts]
    return sample(logits, batch, torch.tensor(lengths), seen_tokens(starts, logits.shape[1]))


def seen_tokens(starts: Sequence[RowStart], vocab: int) -> SeenTokens:
    counts = TokenCounts(vocab)
    slots = {row: counts.acquire(s.tokens, s.prompt_len) for row, s in enumerate(starts) if s.params.penalises}
    entries = [(row, slot, token) for row, slot in slots.items() for token in starts[row].tokens]
    return counts.look_up(*torch.tensor(entries, dtype=torch.int64).reshape(-1, 3).T)


def ids(logits: Tensor, starts: Sequence[RowStart], **arguments) -> list[int]:
    result = run(logits, starts, **arguments)
    assert result.finite.all()
    assert result.possible.all()
    return result.ids.tolist()


def naive_scores(row: Tensor, s: RowStart, vocab_limit: int) -> list[float]:
    """Logits after bias, masks and penalties, token by token."""
    scores = row.tolist()[:vocab_limit]
    p = s.params
    for token in range(vocab_limit):
        if token in p.logit_bias:
            scores[token] += p.logit_bias[token]
        if p.allowed_token_ids and token not in p.allowed_token_ids:
            scores[token] = -INF
        if len(s.tokens) - s.prompt_len < p.min_tokens and token in s.stop_ids:
            scores[token] = -INF
        generated = s.tokens[s.prompt_len :].count(token)
        if token in s.tokens:
            repetition = p.repetition_penalty
            scores[token] = scores[token] / repetition if scores[token] > 0 else scores[token] * repetition
        if generated:
            scores[token] -= p.presence_penalty + p.frequency_penalty * generated
    return scores


def naive_distribution(row: Tensor, s: RowStart, vocab_limit: int) -> dict[int, float]:
    """What a random row should be drawn from, in order of decreasing probability."""
    p = s.params
    scores = [score / p.temperature for score in naive_scores(row, s, vocab_limit)]
    order = sorted(range(vocab_limit), key=lambda i: (-scores[i], i))
    weights = {i: math.exp(scores[i] - scores[order[0]]) for i in order}
    if p.top_k:
        weights = dict(list(weights.items())[: p.top_k])
    if p.top_p < 1:
        total, before, kept = sum(weights.values()), 0.0, {}
        for i, weight in weights.items():
            if before < p.top_p * total:
                kept[i] = weight
            before += weight
        weights = kept
    weights = {i: weight for i, weight in weights.items() if weight >= p.min_p}
    total = sum(weights.values())
    return {i: weight / total for i, weight in weights.items()}


def naive_draw(row: Tensor, s: RowStart, vocab_limit: int) -> int:
    where = (torch.tensor([s.seed]), torch.tensor([s.candidate]), torch.tensor([len(s.tokens)]))
    distribution = naive_distribution(row, s, vocab_limit)
    times = log_waiting_times(stream_keys(*where), torch.tensor(list(distribution)))[0].tolist()
    arrivals = {
        token: math.log(probability) - time if probability else -math.inf
        for (token, probability), time in zip(distribution.items(), times, strict=True)
    }
    return max(arrivals, key=arrivals.__getitem__)


def chi_square_fits(drawn: Sequence[int], expected: dict[int, float]) -> bool:
    """Whether draws match a distribution; the statistic's normal approximation may be off by 4 sigma."""
    histogram = np.bincount(drawn)
    assert set(np.nonzero(histogram)[0].tolist()) <= set(expected), "drew what was filtered out"
    large = {token: share * len(drawn) for token, share in expected.items() if share * len(drawn) >= 5}
    rest = len(drawn) - sum(large.values())
    pairs = [(histogram[token] if token < len(histogram) else 0, count) for token, count in large.items()]
    if rest >= 5:
        pairs.append((len(drawn) - sum(seen for seen, _ in pairs), rest))
    statistic = sum((seen - count) ** 2 / count for seen, count in pairs)
    freedom = max(1, len(pairs) - 1)
    return abs(statistic - freedom) < 4 * math.sqrt(2 * freedom) + 4


# Distribution

FILTERS = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 10},
    {"top_p": 0.7},
    {"min_p": 0.05},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.02, "temperature": 1.5},
    {"top_k": 200},
    {"top_p": 0.9, "temperature": 5.0},
]


@pytest.mark.parametrize("fields", FILTERS, ids=str)
def test_draws_follow_the_distribution(fields):
    torch.manual_seed(3)
    row = torch.randn(700) * 2
    draws = 20_000
    # One request, many positions: what a long reply from constant logits would be.
    s = start(seed=11, **fields)
    batch = sampling_batch([s] * 500, 700)
    logits = row.expand(500, 700)
    drawn: list[int] = []
    for first in range(0, draws, 500):
        drawn += sample(logits, batch, torch.arange(first, first + 500)).ids.tolist()
    assert chi_square_fits(drawn, naive_distribution(row, s, 700))


def test_requests_without_seed_differ():
    """failure 20: rows with other seeds draw independently from equal logits; the same seed repeats."""
    logits = torch.zeros(20, 1000)
    drawn = ids(logits, [start(seed=seed) for seed in range(20)])
    assert len(set(drawn)) > 15
    assert drawn[7] == ids(logits[:1], [start(seed=7)])[0]
    assert len(set(ids(logits, [start(seed=7)] * 20))) == 1


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_equals_the_naive_reference(data):
    """Every choice, with all parameters mixed, token by token."""
    vocab, limit = data.draw(st.sampled_from([(60, 55), (700, 600)]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    rows = data.draw(st.integers(1, 5))
    logits = (torch.randn(rows, vocab, generator=generator) * 6).round() / 2  # with ties
    token = st.integers(0, vocab - 1)
    starts = []
    for _ in range(rows):
        tokens = data.draw(st.lists(token, min_size=1, max_size=12))
        starts.append(
            start(
                tokens,
                data.draw(st.integers(1, len(tokens))),
                data.draw(st.lists(token, max_size=3)),
                seed=data.draw(st.integers(-(2**63), 2**63 - 1)),
                temperature=data.draw(st.sampled_from([0.0, 0.3, 1.0, 2.0])),
                top_k=data.draw(st.sampled_from([0, 1, 2, 7, 54, 55, 70, 1000])),
                top_p=data.draw(st.sampled_from([1.0, 0.0, 1e-4, 0.5, 0.9])),
                min_p=data.draw(st.sampled_from([0.0, 0.1, 1.0])),
                presence_penalty=data.draw(st.sampled_from([0.0, 0.5])),
                frequency_penalty=data.draw(st.sampled_from([0.0, -0.5, 1.5])),
                repetition_penalty=data.draw(st.sampled_from([1.0, 0.5, 2.0])),
                logit_bias=data.draw(st.dictionaries(token, st.sampled_from([-100.0, -1.0, 2.5]), max_size=3)),
                allowed_token_ids=(*data.draw(st.sampled_from([(), (1, 2, 3, 50, vocab - 1), (4,)])),),
                min_tokens=data.draw(st.sampled_from([0, 3])),
            )
        )
    expected = []
    for row, s in zip(logits, starts, strict=True):
        if set(s.params.allowed_token_ids) and set(s.params.allowed_token_ids) <= set(s.stop_ids):
            s = replace(s, stop_ids=[])
        scores = naive_scores(row, s, limit)
        expected.append(scores.index(max(scores)) if s.params.greedy else naive_draw(row, s, limit))
    assert ids(logits, starts, vocab_limit=limit) == expected


# Greedy

TINY = [
    {"temperature": 0.0},
    {"temperature": 1e-4},
    {"temperature": 1e-5},
    {"temperature": 1e-8},
    {"top_k": 1},
    {"top_p": 0.0},
    {"top_p": 1e-4},
    {"top_p": 1e-300},
    {"temperature": 0.001},
    {"min_p": 1.0},
]


@pytest.mark.parametrize("fields", TINY, ids=str)
def test_what_is_as_good_as_greedy_takes_the_first_maximum(fields):
    """failure 22: tiny temperatures and top_p neither overflow nor change the greedy choice."""
    torch.manual_seed(4)
    logits = torch.randn(8, 1500).mul(50).bfloat16().float()
    expected = logits.argmax(-1).tolist()
    assert ids(logits, [start(seed=seed, **fields) for seed in range(8)]) == expected


@pytest.mark.parametrize("fields", [*TINY[:8]], ids=str)
def test_among_equals_the_lowest_id_wins(fields):
    """failure 22"""
    logits = torch.zeros(1, 3000)
    logits[0, [17, 40, 2900]] = 30.0
    assert ids(logits, [start(**fields)]) == [17]


def test_huge_logits_do_not_overflow():
    """failure 22"""
    logits = torch.tensor([[1e30, -1e30, 9e29, 0.0]])
    assert ids(logits, [start(temperature=0.001)]) == [0]
    assert ids(logits, [start(temperature=0.001, top_k=3)]) == [0]


def test_greedy_beside_random_rows_with_banned_tokens():
    """failure 23: a greedy row with -inf logits next to a random one with top_p."""
    torch.manual_seed(5)
    logits = torch.randn(2, 50)
    best = int(logits[0].argmax())
    greedy = start(temperature=0.0, stop_ids=[best], min_tokens=5)
    other = start(top_p=0.9, seed=3)
    second = int(logits[0].argsort(descending=True)[1])
    alone = ids(logits[1:], [other])[0]
    assert ids(logits, [greedy, other]) == [second, alone]
    assert ids(logits.flip(0), [other, greedy]) == [alone, second]


# Independence of rows


def mixed_starts(vocab: int) -> list[RowStart]:
    return [
        start(temperature=0.0),
        start(temperature=0.0, repetition_penalty=2.0, tokens=list(range(0, vocab, 3)), prompt_len=5),
        start(seed=1),
        start(seed=2, temperature=0.7, top_k=50),
        start(seed=3, top_p=0.95),
        start(seed=4, top_p=0.999, temperature=2.0),
        start(seed=5, min_p=0.01),
        start(seed=6, top_k=1, repetition_penalty=1.3),
        start(seed=7, top_k=CANDIDATES[1] + 50, top_p=0.98),
        start(seed=8, presence_penalty=1.0, frequency_penalty=0.5, tokens=[1, 2, 2, 5, 2], prompt_len=2),
        start(seed=9, allowed_token_ids=(3, 4, 700), min_tokens=4, stop_ids=[3]),
        start(seed=10, logit_bias={5: 4.0, 6: -100.0}),
    ]


@pytest.mark.parametrize(("threads", "vocab"), [(1, 1501), (1, 33_003), (2, 33_003)], indirect=["threads"])
def test_a_row_is_the_same_alone_in_any_batch_and_order(threads, vocab):
    """failure 26: bit for bit, whatever the neighbours and their parameters."""
    torch.manual_seed(6)
    starts = mixed_starts(vocab)
    logits = torch.randn(len(starts), vocab)
    alone = [ids(logits[i : i + 1], [s])[0] for i, s in enumerate(starts)]
    assert ids(logits, starts) == alone
    for count in (len(starts), 5):
        order = torch.randperm(len(starts))[:count].tolist()
        assert ids(logits[order], [starts[i] for i in order]) == [alone[i] for i in order]


@pytest.mark.parametrize("flat", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("ties", [False, True])
def test_any_number_of_candidates_gives_the_same(flat, ties):
    """Rows whose kept set is larger than the first candidates, or ends among equals, are drawn exactly."""
    torch.manual_seed(7)
    vocab = 2 * CANDIDATES[1]
    logits = torch.randn(22, vocab) * flat
    if ties:
        logits = logits.bfloat16().float()
    starts = [start(seed=seed, top_p=0.9 + seed / 100) for seed in range(6)]
    starts += [start(seed=seed, top_k=CANDIDATES[0] - 9 + seed) for seed in range(6, 12)]
    starts += [start(seed=seed, top_k=CANDIDATES[1] - 15 + seed) for seed in range(12, 18)]
    starts += [start(seed=seed, top_k=40 * seed, top_p=0.3) for seed in range(18, 22)]
    expected = [naive_draw(row, s, vocab) for row, s in zip(logits, starts, strict=True)]
    assert ids(logits, starts) == expected


def test_a_token_of_probability_zero_never_arrives():
    logits = torch.full((200, 50), -torch.inf)
    logits[:, 7] = -40.0
    scaled = logits - log_waiting_times(torch.randint(-(2**31), 2**31, (200, 2)).int(), torch.arange(50))
    assert scaled.argmax(-1).tolist() == [7] * 200


# Masks


def test_bans_end_with_min_tokens():
    logits = torch.tensor([[0.0, 5.0, 1.0]])
    s = start(tokens=[0, 0], prompt_len=2, temperature=0.0, min_tokens=3, stop_ids=[1])
    assert [ids(logits, [s], positions=[length])[0] for length in (2, 3, 4, 5, 6)] == [2, 2, 2, 1, 1]


def test_stop_ids_outside_the_vocabulary_touch_no_other_row():
    """failure 28: nothing is written past a row's end, nor before its start."""
    torch.manual_seed(8)
    logits = torch.randn(3, 40)
    kept = logits.clone()
    stray = start(temperature=0.0, min_tokens=1, stop_ids=[40, 41, 1040, -1], logit_bias={55: 100.0})
    assert ids(logits, [stray] * 3) == logits.argmax(-1).tolist()
    assert torch.equal(logits, kept)


def test_allowed_ids_that_are_all_stop_ids_may_be_sampled():
    """Only stop ids are allowed, and min_tokens bans them: the allowance wins, for nothing else is left."""
    logits = torch.randn(1, 20)
    s = start(temperature=0.0, allowed_token_ids=(4, 9), min_tokens=2, stop_ids=[4, 9, 11])
    assert ids(logits, [s])[0] in (4, 9)
    everything = start(seed=1, min_tokens=2, stop_ids=list(range(20)))
    assert run(logits, [everything]).possible.all()


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"temperature": 50.0}, {"top_p": 0.99}, {"min_p": 0.001}])
def test_padding_of_the_head_is_never_sampled(fields):
    """failure 29: ids above the tokenizer's highest have the largest logits here."""
    logits = torch.zeros(200, 64)
    logits[:, 60:] = 20.0
    drawn = ids(logits, [start(seed=seed, **fields) for seed in range(200)], vocab_limit=60)
    assert max(drawn) < 60


def test_a_row_without_any_possible_token_fails_alone():
    logits = torch.randn(3, 64)
    starts = [start(seed=1), start(seed=2, allowed_token_ids=(62, 63)), start(seed=3, top_p=0.5)]
    result = run(logits, starts, vocab_limit=60)
    assert result.possible.tolist() == [True, False, True]
    assert result.finite.all()
    assert result.ids[[0, 2]].tolist() == ids(logits[[0, 2]], [starts[0], starts[2]], vocab_limit=60)


@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
def test_a_row_with_bad_logits_fails_alone(bad):
    starts = mixed_starts(1501)
    torch.manual_seed(9)
    logits = torch.randn(len(starts), 1501)
    expected = ids(logits, starts)
    for broken in range(len(starts)):
        damaged = logits.clone()
        damaged[broken, 77] = bad
        result = run(damaged, starts)
        assert (~result.finite).nonzero().tolist() == [[broken]]
        others = [i for i in range(len(starts)) if i != broken]
        assert result.ids[others].tolist() == [expected[i] for i in others]


# Penalties


def test_penalties_against_values_worked_by_hand():
    """Prompt 1, 2; output 2, 3, 3. Repetition counts both, presence and frequency the output alone."""
    logits = torch.tensor([[1.0, 4.0, 4.0, -2.0, 0.0]])
    counts = TokenCounts(5)
    s = start([1, 2, 2, 3, 3], 2, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0)
    slot = counts.acquire(s.tokens, s.prompt_len)
    penalised = penalise(
        logits,
        counts.in_prompt[slot : slot + 1],
        counts.output[slot : slot + 1],
        *(torch.tensor([[value]]) for value in (0.5, 0.25, 2.0)),
    )
    assert penalised.tolist() == [[1.0, 2.0, 1.25, -5.0, 0.0]]


def test_counts_rebuilt_from_tokens_equal_counts_kept():
    """failure 61: a row that resumes after a preemption has seen what it had seen before."""
    torch.manual_seed(10)
    counts = TokenCounts(30)
    first, other = counts.acquire([1, 2, 3], 3), counts.acquire([4], 1)
    output = torch.randint(30, (40,)).tolist()
    for token in output:
        counts.add(torch.tensor([first, other]), torch.tensor([token, 7]))
    resumed = counts.acquire([1, 2, 3, *output], 3)
    assert torch.equal(counts.output[first], counts.output[resumed])
    assert torch.equal(counts.in_prompt[first], counts.in_prompt[resumed])
    assert counts.output[other, 7] == 40


def test_slots_are_reused_clean():
    counts = TokenCounts(10)
    slots = [counts.acquire([1, 1, 2], 1) for _ in range(9)]
    capacity = len(counts.output)
    for slot in slots:
        counts.release(slot)
    again = [counts.acquire([5, 6], 2) for _ in range(9)]
    assert len(counts.output) == capacity
    assert counts.output[again].sum() == 0
    assert counts.in_prompt[again].sum() == 18
