"""Lengths, vocabularies and the workloads of random prompts."""

import json
import math
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from paceline.checkpoint.tokenizer import Tokenizer
from paceline.lab.workload import lengths
from paceline.lab.workload.draft import Draft
from paceline.lab.workload.generator import generator
from paceline.lab.workload.invalid import InvalidWorkload
from paceline.lab.workload.replay import trace_drafts
from paceline.lab.workload.synthetic import fixed_lengths, length_distribution, multi_turn, shared_prefix
from paceline.lab.workload.traces import TraceRow
from paceline.lab.workload.vocabulary import (
    COMMON_IDS,
    COMMON_WORDS,
    Vocabulary,
    ordinary_ids,
    read_tokenizer,
    single_token_words,
)
from tiny_vocabularies import byte_fallback, byte_level

IDS = Vocabulary(COMMON_IDS, "ids")
TEXT = Vocabulary(COMMON_WORDS, "text")
CHAT = Vocabulary(COMMON_WORDS, "chat")


def ids(draft: Draft) -> list[Any]:
    assert isinstance(draft.prompt, list)
    return draft.prompt


def test_fixed_lengths() -> None:
    drafts = fixed_lengths(64, 100, 7, vocabulary=IDS, seed=1)
    assert [(len(ids(draft)), draft.prompt_tokens, draft.output_tokens) for draft in drafts] == [(100, 100, 7)] * 64
    tokens = [token for draft in drafts for token in ids(draft)]
    assert all(type(token) is int and token in COMMON_IDS for token in tokens)
    assert np.mean(tokens) == pytest.approx(16_000, abs=5 * 30_000 / math.sqrt(12 * 6400))
    assert len({tuple(ids(draft)[:16]) for draft in drafts}) == 64  # nothing is shared


def test_a_seed_gives_the_same_prompts_on_every_platform() -> None:
    assert generator(7, "tokens").integers(30000, size=4).tolist() == [19165, 25572, 29955, 25809]
    assert fixed_lengths(1, 4, 1, vocabulary=IDS, seed=7)[0].prompt == [20165, 26572, 30955, 26809]
    assert lengths.lognormal(100, 50)(5, generator(7, "x")).tolist() == [61, 73, 109, 91, 84]
    assert lengths.normal(100, 50)(5, generator(7, "x")).tolist() == [60, 78, 121, 102, 93]
    row = TraceRow(0, 4, 1, (0, 2**70 + 5), 2)
    assert trace_drafts([row], vocabulary=IDS, seed=7)[0].prompt == [
        COMMON_IDS[splitmix64(key) * 30_000 >> 32] for key in (0, 1, 10, 11)
    ]


def splitmix64(counter: int) -> int:
    """High 32 bits of that number of the sequence, in whole numbers of any size."""
    state = (counter * 0x9E3779B97F4A7C15 + int(generator(7, "blocks").integers(2**63))) % 2**64
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
    return (state ^ state >> 31) >> 32


def test_a_run_changes_tokens_but_not_lengths() -> None:
    def make(seed: int, run: int) -> list[Draft]:
        sizes = lengths.uniform(1, 50)
        return length_distribution(40, sizes, sizes, vocabulary=IDS, seed=seed, run=run)

    def sizes(drafts: list[Draft]) -> list[tuple[int | None, int]]:
        return [(draft.prompt_tokens, draft.output_tokens) for draft in drafts]

    assert make(3, 0) == make(3, 0)
    assert sizes(make(3, 1)) == sizes(make(3, 0))
    assert not any(a.prompt == b.prompt for a, b in zip(make(3, 0), make(3, 1), strict=True) if len(ids(a)) > 2)
    assert sizes(make(4, 0)) != sizes(make(3, 0))
    assert [size for size, _ in sizes(make(3, 0))] != [size for _, size in sizes(make(3, 0))]  # drawn independently


@pytest.mark.parametrize(
    ("make", "mean", "std"),
    [
        (lengths.fixed(9), 9, 0),
        (lengths.uniform(10, 20), 15, math.sqrt((11**2 - 1) / 12)),
        (lengths.normal(1000, 100), 1000, 100),
        (lengths.lognormal(1000, 800), 1000, 800),
        (lengths.empirical([1, 1, 1, 5]), 2, math.sqrt(3)),
    ],
)
def test_distributions_have_their_moments(make: lengths.Lengths, mean: float, std: float) -> None:
    drawn = make(100_000, generator(1, "x"))
    assert drawn.dtype == np.int64
    assert drawn.mean() == pytest.approx(mean, abs=6 * std / math.sqrt(100_000))
    assert drawn.std() == pytest.approx(std, rel=0.03)


def test_lognormal_is_normal_in_logarithms() -> None:
    logs = np.log(lengths.lognormal(50_000, 30_000)(50_000, generator(2, "x")))
    standard = (logs - logs.mean()) / logs.std()
    assert abs((standard**3).mean()) < 0.05
    assert (standard**4).mean() == pytest.approx(3, abs=0.15)


@given(st.floats(1, 100), st.floats(0, 300), st.integers(1, 20), st.integers(20, 90))
def test_limits_hold(mean: float, std: float, low: int, high: int) -> None:
    for make in (lengths.normal(mean, std, low, high), lengths.lognormal(mean, std, low, high)):
        drawn = make(50, generator(1, "x"))
        assert drawn.min() >= low
        assert drawn.max() <= high


def test_lengths_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("12\n\n 7 \n")
    assert lengths.read_lengths(file) == [12, 7]
    for text, message in (("12\n0\n", ":2: a length is"), ("1.5\n", ":1: a length is"), ("\n", ": holds no lengths")):
        file.write_text(text)
        with pytest.raises(InvalidWorkload) as caught:
            lengths.read_lengths(file)
        assert str(caught.value).startswith(f"{file}{message}")
    with pytest.raises(InvalidWorkload, match="No such file"):
        lengths.read_lengths(tmp_path / "nowhere")


def test_special_and_added_ids_are_never_drawn() -> None:
    for backend in (byte_level(), byte_fallback()):
        drawable = ordinary_ids(Tokenizer(backend))
        left_out = {backend.id_to_token(id) for id in range(backend.get_vocab_size())} - {
            backend.id_to_token(id) for id in drawable
        }
        assert left_out == {token.content for token in backend.get_added_tokens_decoder().values()}
        assert drawable == sorted(drawable)


@pytest.mark.parametrize("backend", [byte_level, byte_fallback])
def test_words_are_one_token_each(backend: Any) -> None:
    tokenizer = Tokenizer(backend())
    words = single_token_words(tokenizer)
    assert {"hello", "the"} <= set(words)
    (draft,) = fixed_lengths(1, 30, 1, vocabulary=Vocabulary(words, "text"))
    assert isinstance(draft.prompt, str)
    first = len(tokenizer.encode(draft.prompt.split()[0], add_special_tokens=False))
    assert len(tokenizer.encode(draft.prompt, add_special_tokens=False)) == 29 + first


def test_words_that_text_never_becomes_are_left_out() -> None:
    content = json.loads(byte_level().to_str())
    content["model"]["vocab"]["Ġzebra"] = 1000  # without merges that lead to it
    words = single_token_words(Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(content))))
    assert "hello" in words
    assert "zebra" not in words


def test_common_words_are_words_of_a_real_tokenizer() -> None:
    words = single_token_words(read_tokenizer("smollm2"))
    assert len(words) > 10_000
    assert set(COMMON_WORDS) <= set(words)
    assert len(set(COMMON_WORDS)) == len(COMMON_WORDS)


def test_a_tokenizer_without_words_says_so() -> None:
    class Bytes(Tokenizer):
        def token(self, token_id: int) -> str:
            return "x"

    with pytest.raises(InvalidWorkload, match="tokenizer: has no words"):
        single_token_words(Bytes(byte_level()))


def test_tokenizers_are_found(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    assert read_tokenizer(str(tmp_path)).vocab_size == byte_level().get_vocab_size()
    with pytest.raises(InvalidWorkload, match=r"tokenizer: no 'org/name' on this machine; .*smollm2"):
        read_tokenizer("org/name")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidWorkload, match=r"tokenizer: .*neither config.json nor"):
        read_tokenizer(str(tmp_path / "empty"))


def test_forms() -> None:
    text, chat = (fixed_lengths(3, 20, 5, vocabulary=vocabulary) for vocabulary in (TEXT, CHAT))
    for first, second in zip(text, chat, strict=True):
        assert isinstance(first.prompt, str)
        assert len(first.prompt.split(" ")) == 20
        assert second.prompt == [{"role": "user", "content": first.prompt}]
        assert first.prompt_tokens is second.prompt_tokens is None


def test_shared_prefixes() -> None:
    suffixes, outputs = lengths.uniform(8, 12), lengths.fixed(4)
    drafts = shared_prefix(12, 3, 50, suffixes, outputs, vocabulary=IDS, seed=2)
    prefixes = [tuple(ids(draft)[:50]) for draft in drafts]
    assert [prefixes.index(prefix) for prefix in prefixes] == [0, 1, 2] * 4
    assert len({tuple(ids(draft)[50:58]) for draft in drafts}) == 12
    assert all(draft.prompt_tokens == len(ids(draft)) and 58 <= len(ids(draft)) <= 62 for draft in drafts)
    (a, _, _, b) = shared_prefix(4, 3, 50, suffixes, outputs, vocabulary=TEXT)
    assert str(a.prompt).split()[:50] == str(b.prompt).split()[:50]
    assert str(a.prompt).split()[50:] != str(b.prompt).split()[50:]


def test_turns_follow_each_other() -> None:
    drafts = multi_turn(2, 3, lengths.fixed(5), lengths.uniform(2, 9), vocabulary=CHAT, think_s=2.0, think_cv=0, seed=1)
    assert [draft.after for draft in drafts] == [None, 0, 1, None, 3, 4]
    assert [draft.delay_s for draft in drafts] == [0, 2.0, 2.0, 0, 2.0, 2.0]
    assert [draft.needs for draft in drafts] == [False, True, True] * 2
    for index in (1, 2, 4, 5):  # a prompt starts with that of the turn before; the replies are put between later
        assert ids(drafts[index])[:-1] == ids(drafts[index - 1])
    assert [len(ids(draft)) for draft in drafts] == [1, 2, 3] * 2
    said = [ids(draft)[-1]["content"] for draft in drafts]
    assert all(len(text.split()) == 5 for text in said)
    assert len(set(said)) == 6


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0])
def test_think_times(cv: float) -> None:
    sizes = lengths.fixed(1)
    drafts = multi_turn(200, 51, sizes, sizes, vocabulary=CHAT, think_s=3.0, think_cv=cv, seed=1)
    pauses = [draft.delay_s for draft in drafts if draft.after is not None]
    assert np.mean(pauses) == pytest.approx(3.0, abs=6 * 3 * cv / 100)
    assert np.std(pauses) / np.mean(pauses) == pytest.approx(cv, rel=0.1)


def mooncake(*blocks: int, size: int) -> TraceRow:
    return TraceRow(0.0, size, 10, blocks, 512)


def test_equal_blocks_are_equal_tokens() -> None:
    rows = [mooncake(0, 1, 2, size=1100), mooncake(0, 1, 3, size=1536), mooncake(0, 4, size=513)]
    first, second, third = (ids(draft) for draft in trace_drafts(rows, vocabulary=IDS))
    assert [len(first), len(second), len(third)] == [1100, 1536, 513]
    assert first[:1024] == second[:1024]
    assert first[1024:] != second[1024:1100]
    assert third[:512] == first[:512]
    assert third[512] != first[512]
    (alone,) = trace_drafts(rows[1:2], vocabulary=IDS)  # a slice makes the same prompts
    assert ids(alone) == second
    assert ids(trace_drafts(rows, vocabulary=IDS, run=1)[0])[:512] != first[:512]


def test_tokens_of_blocks_are_spread_evenly() -> None:
    vocabulary = Vocabulary(range(100), "ids")
    rows = [mooncake(*range(start, start + 20), size=20 * 512) for start in range(0, 200, 20)]
    drafts = trace_drafts(rows, vocabulary=vocabulary)
    counts = Counter(token for draft in drafts for token in ids(draft))
    expected = 10 * 20 * 512 / 100
    chi_squared = sum((counts[token] - expected) ** 2 / expected for token in range(100))
    assert chi_squared < 99 + 4 * math.sqrt(2 * 99)
    places: dict[int, set[Any]] = defaultdict(set)  # not the same token at the same place of every block
    for draft in drafts:
        for index, token in enumerate(ids(draft)):
            places[index % 512].add(token)
    assert min(len(tokens) for tokens in places.values()) > 60


def test_a_prompt_longer_than_its_blocks_has_an_end_of_its_own() -> None:
    rows = [TraceRow(0.0, 40, 1, (5, 6), 16), TraceRow(1.0, 40, 1, (5, 6), 16), TraceRow(2.0, 0, 0)]
    first, second, empty = trace_drafts(rows, vocabulary=IDS)
    assert ids(first)[:32] == ids(second)[:32]
    assert ids(first)[32:] != ids(second)[32:]
    assert (len(ids(empty)), empty.prompt_tokens, empty.output_tokens) == (1, 1, 1)
    assert [draft.time_s for draft in (first, second, empty)] == [0.0, 1.0, 2.0]


def test_chats_of_a_trace() -> None:
    rows = [
        TraceRow(0.0, 4, 100, chat="a"),
        TraceRow(1.0, 4, 5, chat="b", parent="not in this slice"),
        TraceRow(9.0, 8, 7, chat="c", parent="a"),
        TraceRow(9.5, 8, 7, chat="d", parent="c"),
    ]
    drafts = trace_drafts(rows, vocabulary=IDS, seconds_per_token=0.08)
    assert [draft.after for draft in drafts] == [None, None, 0, 2]
    assert [draft.delay_s for draft in drafts] == pytest.approx([0, 0, 1.0, 0])
    assert not any(draft.needs for draft in drafts)
    assert [draft.after for draft in trace_drafts(rows, vocabulary=IDS, sessions=False)] == [None] * 4
    assert trace_drafts(rows, vocabulary=IDS)[2].delay_s == 9.0
