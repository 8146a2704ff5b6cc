import json
from pathlib import Path
from typing import Any

import pytest

from paceline.lab.workload.arrivals import constant, gamma, poisson, ramp
from paceline.lab.workload.draft import Draft
from paceline.lab.workload.invalid import InvalidWorkload
from paceline.lab.workload.lengths import fixed, normal, uniform
from paceline.lab.workload.spec import arrivals_from, stage_from, workload_facts, workload_from
from paceline.lab.workload.synthetic import fixed_lengths, length_distribution, multi_turn, shared_prefix
from paceline.lab.workload.vocabulary import COMMON_IDS, COMMON_WORDS, Vocabulary, ordinary_ids, read_tokenizer
from tiny_vocabularies import byte_level

IDS = Vocabulary(COMMON_IDS, "ids")
CHAT = Vocabulary(COMMON_WORDS, "chat")
FIXED = {"kind": "fixed", "requests": 5, "input": 9, "output": 3}


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path)


def trace(folder: Path) -> str:
    rows = [
        {"timestamp": 3000 * (i // 4), "input_length": 100 + i, "output_length": 5, "hash_ids": [0]} for i in range(12)
    ]
    file = folder / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return str(file)


def test_kinds_are_the_makers() -> None:
    assert workload_from(FIXED) == fixed_lengths(5, 9, 3, vocabulary=IDS)
    assert workload_from({**FIXED, "seed": 4}, run=2) == fixed_lengths(5, 9, 3, vocabulary=IDS, seed=4, run=2)
    spread = {"kind": "uniform", "min": 5, "max": 60}
    spec: dict[str, Any] = {"kind": "lengths", "requests": 5, "input": spread, "output": 3}
    assert workload_from(spec) == length_distribution(5, uniform(5, 60), fixed(3), vocabulary=IDS)
    spec["input"] = {"kind": "normal", "mean": 50, "std": 20.5, "max": 60}
    assert workload_from(spec) == length_distribution(5, normal(50, 20.5, 1, 60), fixed(3), vocabulary=IDS)
    spec = {"kind": "shared_prefix", "requests": 6, "groups": 2, "prefix": 30, "suffix": spread, "output": 3}
    assert workload_from(spec) == shared_prefix(6, 2, 30, uniform(5, 60), fixed(3), vocabulary=IDS)
    spec = {"kind": "multi_turn", "sessions": 2, "turns": 3, "input": 4, "output": spread, "think_s": 1.5}
    assert workload_from(spec) == multi_turn(2, 3, fixed(4), uniform(5, 60), think_s=1.5, vocabulary=CHAT)


def test_vocabularies(tokenizer: str) -> None:
    small = workload_from({**FIXED, "input": 500, "token_ids": [5, 8]})
    assert {token for draft in small for token in draft.prompt} == {5, 6, 7}
    known = Vocabulary(ordinary_ids(read_tokenizer(tokenizer)), "ids")
    assert workload_from({**FIXED, "tokenizer": tokenizer}) == fixed_lengths(5, 9, 3, vocabulary=known)
    words = workload_from({**FIXED, "tokenizer": tokenizer, "form": "text"})
    assert all(isinstance(draft.prompt, str) for draft in words)
    assert workload_from({**FIXED, "form": "chat"}) == fixed_lengths(5, 9, 3, vocabulary=CHAT)


def test_files(tmp_path: Path, tokenizer: str) -> None:
    book, chat, counts = (tmp_path / name for name in ("book.txt", "chat.jsonl", "lengths.txt"))
    book.write_text("the quick brown fox " * 20)
    chat.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "hello"}]}\n' * 3)
    counts.write_text("4\n4\n")
    spec = {"kind": "text", "path": str(book), "requests": 4, "input": 5, "output": 2}
    assert all(len(str(draft.prompt).split()) == 5 for draft in workload_from(spec))
    assert workload_facts(spec)["cut_by"] == "words"
    spec = {**spec, "tokenizer": tokenizer, "output": {"kind": "empirical", "path": str(counts)}}
    assert [(draft.prompt_tokens, draft.output_tokens) for draft in workload_from(spec)] == [(5, 4)] * 4
    assert workload_facts(spec)["cut_by"] == "tokens"
    assert len(workload_from({"kind": "chat", "path": str(chat), "tokenizer": tokenizer})) == 3
    assert len(workload_from({"kind": "chat", "path": str(chat), "output": 5, "requests": 2, "turns": "first"})) == 2
    assert workload_facts(FIXED) == FIXED


def test_trace(tmp_path: Path) -> None:
    spec = {"kind": "trace", "path": trace(tmp_path)}
    drafts = workload_from(spec)
    assert [draft.time_s for draft in drafts] == [0.0] * 4 + [3.0] * 4 + [6.0] * 4
    cut = workload_from({**spec, "format": "mooncake", "start_s": 3, "end_s": 6, "scale": 2, "requests": 3})
    assert [(draft.time_s, draft.prompt_tokens) for draft in cut] == [(0.0, 104), (0.0, 105), (0.0, 106)]
    assert [draft.prompt_tokens for draft in workload_from({**spec, "max_tokens": 107})] == [100, 101, 102]
    spread = [draft.time_s for draft in workload_from({**spec, "jitter": True, "scale": 3})]
    assert len(set(spread)) == 12
    assert spread == sorted(spread)
    assert all(
        draft.time_s // 1 == i // 4 for i, draft in enumerate(workload_from({**spec, "jitter": True, "scale": 3}))
    )
    assert [draft.time_s for draft in workload_from({**spec, "first": 6, "scale": 2})] == [0.0] * 2 + [1.5] * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "fixd"}, "kind: must be one of fixed, lengths, shared_prefix, .*, not 'fixd'"),
        ({"input": None}, "input: must be a whole number of at least 1, not None"),
        ({"input": 0}, "input: must be a whole number of at least 1, not 0"),
        ({"output": True}, "output: must be a whole number of at least 1, not True"),
        ({"requests": 2.5}, "requests: must be a whole number of at least 1, not 2.5"),
        ({"outptu": 3}, "outptu: is no key here; these are: form, input, kind, output, requests, seed, "),
        ({"form": "xml"}, "form: must be one of ids, text, chat, not 'xml'"),
        ({"form": "text", "token_ids": [1, 2]}, "token_ids: is no key here"),
        ({"token_ids": [9, 2]}, "token_ids: must rise from 0 or more"),
        ({"token_ids": 9}, "token_ids: must be two whole numbers"),
        ({"tokenizer": "nowhere"}, "tokenizer: no 'nowhere' on this machine"),
        ({"kind": "lengths", "input": {"kind": "zipf"}}, "input.kind: must be one of uniform, normal"),
        ({"kind": "lengths", "input": {"kind": "uniform", "min": 5}}, "input.max: is missing"),
        ({"kind": "lengths", "input": {"kind": "uniform", "min": 5, "max": 4}}, "input.max: must be .* at least 5"),
        ({"kind": "lengths", "output": {"kind": "normal", "mean": 0, "std": 1}}, "output.mean: must be above 0"),
        ({"kind": "lengths", "output": {"kind": "normal", "mean": "x", "std": 1}}, "output.mean: must be a number"),
        ({"kind": "lengths", "output": {"kind": "lognormal", "mean": 1, "std": -1}}, "output.std: must be at least 0"),
        ({"kind": "lengths", "input": {"kind": "uniform", "min": 1, "max": 4, "std": 1}}, "input.std: is no key"),
        ({"kind": "text", "path": ""}, "path: must be text, not ''"),
        ({"kind": "text", "path": "book", "form": "ids"}, "form: must be one of text, chat"),
        ({"kind": "trace", "path": "nowhere.csv"}, "nowhere.csv: "),
    ],
)
def test_errors_name_the_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidWorkload, match=f"^{message}"):
        workload_from({**FIXED, **change})


def test_errors_of_traces(tmp_path: Path) -> None:
    spec = {"kind": "trace", "path": trace(tmp_path)}
    for change, message in (
        ({"tick_s": 3.0}, "tick_s: needs jitter"),
        ({"jitter": "yes"}, "jitter: must be true or false"),
        ({"scale": 0}, "scale: must be above 0"),
        ({"input": 5}, "input: is no key here"),
    ):
        with pytest.raises(InvalidWorkload, match=f"^{message}"):
            workload_from({**spec, **change})


def test_arrivals() -> None:
    assert arrivals_from({"kind": "burst"}, 3) == [0.0] * 3
    assert arrivals_from({"kind": "constant", "rate": 4}, 3) == constant(3, 4)
    assert arrivals_from({"kind": "poisson", "rate": 4, "seed": 2}, 30) == poisson(30, 4, 2)
    assert arrivals_from({"kind": "gamma", "rate": 4, "cv": 3}, 30) == gamma(30, 4, 3)
    assert arrivals_from({"kind": "ramp", "start_rate": 1, "end_rate": 9}, 30) == ramp(30, 1, 9)


@pytest.mark.parametrize(
    ("load", "message"),
    [
        ({}, "kind: is missing"),
        ({"kind": "bursts"}, "kind: must be one of burst, constant, poisson, gamma, ramp"),
        ({"kind": "burst", "rate": 3}, "rate: is no key here; these are: kind"),
        ({"kind": "poisson"}, "rate: is missing"),
        ({"kind": "poisson", "rate": 0}, "rate: must be above 0"),
        ({"kind": "gamma", "rate": 1}, "cv: is missing"),
        ({"kind": "concurrency", "batch": 0}, "batch: must be a whole number of at least 1"),
        ({"kind": "concurrency", "batch": 2, "rate": 3}, "rate: is no key here"),
        ({"kind": "trace", "rate": 3}, "rate: is no key here"),
        ({"kind": "trace"}, "kind: a trace's times need a workload of the kind trace"),
    ],
)
def test_errors_of_loads_name_the_key(load: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidWorkload, match=f"^{message}"):
        stage_from("s", workload_from(FIXED), load, deadline_s=99)


def test_stages() -> None:
    drafts = workload_from(FIXED)
    open_loop = stage_from(
        "s",
        drafts,
        {"kind": "poisson", "rate": 4},
        deadline_s=99,
        ignore_eos=False,
        sampling={"top_p": 0.5},
        workload=FIXED,
    )
    assert [request.due for request in open_loop.requests] == poisson(5, 4)
    assert (open_loop.name, open_loop.offered_rate, open_loop.deadline_s) == ("s", 4, 99)
    assert (open_loop.ignore_eos, open_loop.sampling) == (False, {"top_p": 0.5})
    assert open_loop.load == {"kind": "poisson", "rate": 4, "workload": FIXED}
    burst = stage_from("s", drafts, {"kind": "burst"}, deadline_s=99)
    assert (burst.offered_rate, burst.batch, burst.sampling) == (None, None, {"temperature": 0})
    closed = stage_from("s", drafts, {"kind": "concurrency", "batch": 2}, deadline_s=99, workload=FIXED)
    assert [request.after for request in closed.requests] == [None, None, 0, 1, 2]
    assert (closed.offered_rate, closed.batch) == (None, 2)
    assert closed.load == {"kind": "concurrency", "batch": 2, "workload": FIXED}
    rising = stage_from("s", drafts, {"kind": "ramp", "start_rate": 1, "end_rate": 3}, deadline_s=99)
    assert rising.offered_rate == pytest.approx(4 / ramp(5, 1, 3)[-1])


def test_stage_of_a_trace(tmp_path: Path) -> None:
    drafts = workload_from({"kind": "trace", "path": trace(tmp_path)})
    stage = stage_from("s", drafts, {"kind": "trace"}, deadline_s=99)
    assert [request.due for request in stage.requests] == [draft.time_s for draft in drafts]
    assert stage.offered_rate == pytest.approx(11 / 6)
    assert stage_from("s", drafts, {"kind": "constant", "rate": 2}, deadline_s=99).requests[-1].due == 5.5


def test_sessions_have_no_offered_rate() -> None:
    made = [Draft("a", 1), Draft("b", 1, after=0, delay_s=3.0), Draft("c", 1)]
    stage = stage_from("s", made, {"kind": "constant", "rate": 2}, deadline_s=99)
    assert [(request.due, request.after) for request in stage.requests] == [(0.0, None), (3.0, 0), (0.5, None)]
    assert stage.offered_rate is None
