"""Deltas, however the tokens arrive, add up to the same reply."""

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from paceline.engine.output import Delta, OutputProcessor, RequestOutput, Usage
from paceline.engine.request import CoreOutput, Finish
from paceline.engine.sampling_params import SamplingParams
from paceline.engine.step import TokenLogprobs
from tiny_vocabularies import EOS, Vocabulary, byte_fallback, byte_level

PROMPT = "the quick"


@dataclass
class Generated:
    """What a core made for one candidate."""

    ids: list[int]
    finish: Finish = Finish.LENGTH
    stop_id: int | None = None


def logprob_of(token: int) -> TokenLogprobs:
    return TokenLogprobs(-float(token), 1, [], [])


def core_outputs(candidate: int, made: Generated, sizes: list[int], logprobs: bool = True) -> list[CoreOutput]:
    """``made`` in pushes of these sizes; the finish comes with the last tokens."""
    outputs, start = [], 0
    while start < len(made.ids) or not outputs:
        size = sizes.pop(0) if sizes else 1
        ids = made.ids[start : start + size]
        start += size
        output = CoreOutput(request=1, candidate=candidate, ids=ids)
        if logprobs:
            output.logprobs = [logprob_of(token) for token in ids]
        outputs.append(output)
    outputs[-1].finish, outputs[-1].stop_id = made.finish, made.stop_id
    return outputs


def reply(
    tokenizer: Tokenizer, params: SamplingParams, outputs: list[CoreOutput], prompt: str = PROMPT
) -> tuple[RequestOutput, list[Delta]]:
    prompt_ids = tokenizer.encode(prompt).ids
    processor = OutputProcessor(tokenizer, prompt_ids, params)
    whole, deltas = RequestOutput(prompt_ids, params.n), []
    for output in outputs:
        delta = processor.push(output)
        if delta is not None:
            whole.add(delta)
            deltas.append(delta)
    assert processor.finished == whole.finished
    return whole, deltas


def one(tokenizer: Tokenizer, text: str, sizes: list[int] | None = None, **params) -> tuple[RequestOutput, list[Delta]]:
    """The reply of a single candidate that generates ``text`` to its end."""
    made = Generated(tokenizer.encode(text).ids)
    return reply(tokenizer, SamplingParams(max_tokens=None, **params), core_outputs(0, made, sizes or []))


def seen(whole: RequestOutput) -> list[tuple]:
    return [(c.text, c.token_ids, c.logprobs, c.finish_reason, c.stop_reason) for c in whole.outputs]


def ends_with_special(tokenizer: Tokenizer, ids: list[int]) -> Generated:
    eos = tokenizer.token_to_id(EOS)
    return Generated([*ids, eos], Finish.STOP, eos)


@settings(max_examples=300)
@given(
    ids=st.lists(st.lists(st.integers(2, 383), max_size=30), min_size=1, max_size=3),
    stop=st.lists(st.text(alphabet="the lo\ufffd", min_size=1, max_size=3), max_size=3).map(tuple),
    min_tokens=st.integers(0, 12),
    include=st.booleans(),
    eos=st.booleans(),
    vocabulary=st.sampled_from([byte_level, byte_fallback]),
    seed=st.integers(0, 10**6),
)
def test_deltas_add_up_to_the_same_reply_for_every_split(
    ids: list[list[int]],
    stop: tuple[str, ...],
    min_tokens: int,
    include: bool,
    eos: bool,
    vocabulary: Vocabulary,
    seed: int,
) -> None:
    """failure 5, failure 17. Text, ids, logprobs and usage; several candidates, their pushes interleaved."""
    tokenizer = vocabulary()
    draw = random.Random(seed)
    hello = tokenizer.encode("hello the world").ids
    made = [draw.sample(hello, len(hello)) + line for line in ids]
    made = [ends_with_special(tokenizer, line) if eos else Generated(line) for line in made]
    params = SamplingParams(
        n=len(made), stop=stop, min_tokens=min_tokens, include_stop_str_in_output=include, max_tokens=None, logprobs=0
    )

    def run(most: int) -> tuple[RequestOutput, list[Delta]]:
        queues = [core_outputs(i, m, [draw.randint(1, most) for _ in m.ids]) for i, m in enumerate(made)]
        mixed = []
        while any(queues):
            mixed.append(draw.choice([queue for queue in queues if queue]).pop(0))
        return reply(tokenizer, params, mixed)

    whole, _ = run(1)
    for most in (1, 2, 5, 100):
        again, deltas = run(most)
        assert seen(again) == seen(whole)
        assert again.usage == whole.usage
        for candidate in again.outputs:
            mine = [delta for delta in deltas if delta.candidate == candidate.index]
            assert "".join(delta.text for delta in mine) == candidate.text
            assert [token for delta in mine for token in delta.ids] == candidate.token_ids
            assert candidate.logprobs == [logprob_of(token) for token in candidate.token_ids]
            assert [delta.finish is not None for delta in mine] == [False] * (len(mine) - 1) + [True]
    assert whole.usage.completion_tokens == sum(len(c.token_ids) for c in whole.outputs)
    for candidate, source in zip(whole.outputs, made, strict=True):
        assert candidate.token_ids == source.ids[: len(candidate.token_ids)]
        if isinstance(candidate.stop_reason, str):
            assert len(candidate.token_ids) >= min_tokens
            assert candidate.text.endswith(candidate.stop_reason) or not include
        else:
            assert candidate.token_ids == source.ids
        if not stop and vocabulary is byte_level:
            assert candidate.text == tokenizer.decode(source.ids)


def test_nothing_of_a_stop_string_is_sent() -> None:
    """failure 7. A stop string over several tokens, streamed token by token."""
    whole, deltas = one(byte_level(), "a b c d e f g h", stop=("e f g",))
    assert whole.outputs[0].text == "a b c d "
    assert not any("e" in delta.text for delta in deltas)
    assert [delta.text for delta in deltas][-3:] == ["", "", ""]
    assert all(delta.ids for delta in deltas), "a delta for every token, also while its text is held back"
    whole, _ = one(byte_level(), "a b c d e f", stop=("e f g",))
    assert whole.outputs[0].text == "a b c d e f", "held text is given out at the end"


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("hello world", "o w", "hell"),
        ("one two three", "\n\n", "one two three"),
        ("hello\n\nworld", "\n\n", "hello"),
        ("hello\n\n\nworld", "\n\n", "hello"),
        ("x y z w", "y z", "x "),
        ("中文字符 日本語", "字符 日", "中文"),
        ("😀😃 hello", "😃", "😀"),
    ],
)
@pytest.mark.parametrize("vocabulary", [byte_level, byte_fallback], ids=lambda make: make.__name__)
def test_stop_strings_across_and_inside_tokens(vocabulary: Vocabulary, text: str, stop: str, expected: str) -> None:
    """failure 8. Matched on text: over several tokens, starting mid-token, with merged newlines, over byte tokens."""
    tokenizer = vocabulary()
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    made = Generated(tokenizer.encode(text).ids)
    params = SamplingParams(max_tokens=None, stop=(stop,))
    whole, _ = reply(tokenizer, params, core_outputs(0, made, []), prompt="")
    assert whole.outputs[0].text == expected
    assert (whole.outputs[0].stop_reason == stop) == (stop in text)
    assert whole.outputs[0].finish_reason == (Finish.STOP if stop in text else Finish.LENGTH)
    kept = whole.outputs[0].token_ids
    if stop in text:
        assert stop in tokenizer.decode(kept), "kept up to the token that completed the stop"
        assert stop not in tokenizer.decode(kept[:-1])
    included, _ = reply(
        tokenizer,
        SamplingParams(max_tokens=None, stop=(stop,), include_stop_str_in_output=True),
        core_outputs(0, made, []),
        prompt="",
    )
    assert included.outputs[0].text == expected + (stop if stop in text else "")


def test_no_stop_string_before_min_tokens() -> None:
    """failure 10. The newline at token 3 is text; the one that token 6 completes counts."""
    tokenizer = byte_level()
    text = "abc\nde\nf\ng"
    ids = tokenizer.encode(text).ids
    assert [tokenizer.decode([token]) for token in ids] == list(text)
    expected = {0: "abc", 3: "abc", 4: "abc", 5: "abc\nde", 7: "abc\nde", 8: "abc\nde\nf", 9: "abc\nde\nf", 10: text}
    for minimum, result in expected.items():
        whole, _ = one(tokenizer, text, stop=("\n",), min_tokens=minimum)
        assert whole.outputs[0].text == result
        assert len(whole.outputs[0].token_ids) >= minimum


def test_ids_logprobs_and_usage_end_at_the_stop() -> None:
    """failure 17. Five tokens in one push, the stop in the third."""
    tokenizer = byte_level()
    ids = tokenizer.encode("abcde").ids
    outputs = core_outputs(0, Generated(ids), [5])
    whole, deltas = reply(tokenizer, SamplingParams(max_tokens=None, stop=("c",), logprobs=0), outputs)
    assert whole.outputs[0].token_ids == ids[:3]
    assert whole.outputs[0].logprobs == [logprob_of(token) for token in ids[:3]]
    assert whole.outputs[0].text == "ab"
    assert whole.usage == Usage(len(whole.prompt_ids), 3, 0)
    assert len(deltas) == 1
    assert deltas[0].finish is Finish.STOP
    assert deltas[0].stop == "c"


def test_outputs_after_the_end_are_dropped() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("abcde").ids
    processor = OutputProcessor(tokenizer, [5], SamplingParams(n=2, max_tokens=None, stop=("b",)))
    outputs = core_outputs(0, Generated(ids), [])
    assert [processor.push(output) is None for output in outputs] == [False, False, True, True, True]
    assert not processor.finished
    assert processor.push(CoreOutput(request=1, candidate=0, finish=Finish.ABORT)) is None
    end = processor.push(CoreOutput(request=1, candidate=1, finish=Finish.ABORT))
    assert end is not None
    assert end.finish is Finish.ABORT
    assert processor.finished


@pytest.mark.parametrize("sizes", [[], [100]])
def test_end_of_sequence_id_is_a_token_but_not_text(sizes: list[int]) -> None:
    """failure 17, failure 41. Also for an id that is no special token; with inclusion its text is kept."""
    tokenizer = byte_level()
    made = ends_with_special(tokenizer, tokenizer.encode("hello world").ids)
    bang = tokenizer.token_to_id("!")
    for include in (False, True):
        for skip in (False, True):
            params = SamplingParams(
                max_tokens=None, logprobs=0, include_stop_str_in_output=include, skip_special_tokens=skip
            )
            whole, _ = reply(tokenizer, params, core_outputs(0, made, list(sizes)))
            assert whole.outputs[0].text == "hello world" + (EOS if include and not skip else "")
            assert whole.outputs[0].token_ids == made.ids
            assert whole.outputs[0].logprobs == [logprob_of(token) for token in made.ids]
            assert whole.usage.completion_tokens == len(made.ids)
            assert (whole.outputs[0].finish_reason, whole.outputs[0].stop_reason) == (Finish.STOP, made.stop_id)
            stopped = Generated([*made.ids[:-1], bang], Finish.STOP, bang)
            whole, _ = reply(tokenizer, params, core_outputs(0, stopped, list(sizes)))
            assert whole.outputs[0].text == "hello world" + ("!" if include else "")
            assert whole.outputs[0].stop_reason == bang


def test_stopped_at_the_first_token() -> None:
    tokenizer = byte_level()
    whole, deltas = reply(tokenizer, SamplingParams(), core_outputs(0, ends_with_special(tokenizer, []), []))
    assert (whole.outputs[0].text, whole.usage.completion_tokens, len(deltas)) == ("", 1, 1)


@pytest.mark.parametrize("finish", [Finish.LENGTH, Finish.ABORT, Finish.ERROR])
def test_an_end_without_tokens_gives_out_what_was_held(finish: Finish) -> None:
    """failure 4. A held stop beginning, and a character cut by the limit: U+FFFD once, last."""
    tokenizer = byte_level()
    ids = [*tokenizer.encode("abc").ids, *tokenizer.encode("ß").ids[:1]]
    assert tokenizer.decode(ids) == "abc\ufffd"
    outputs = [CoreOutput(request=1, candidate=0, ids=[token]) for token in ids]
    outputs.append(CoreOutput(request=1, candidate=0, finish=finish, error="why" * (finish is Finish.ERROR)))
    whole, deltas = reply(tokenizer, SamplingParams(stop=("bcd",)), outputs)
    assert [delta.text for delta in deltas] == ["a", "", "", "", "bc\ufffd"]
    assert whole.outputs[0].finish_reason is finish
    assert whole.outputs[0].error == ("why" if finish is Finish.ERROR else "")


def test_what_is_known_of_the_prompt_is_passed_on() -> None:
    tokenizer = byte_level()
    entries = [logprob_of(1), logprob_of(2)]
    outputs = [
        CoreOutput(request=1, candidate=1, ids=[40], finish=Finish.LENGTH, cached_tokens=16, queued_s=0.5),
        CoreOutput(
            request=1,
            candidate=0,
            ids=[40],
            finish=Finish.LENGTH,
            prompt_logprobs=entries,
            cached_tokens=16,
            queued_s=0.25,
        ),
    ]
    whole, _ = reply(tokenizer, SamplingParams(n=2, prompt_logprobs=0), outputs)
    assert whole.prompt_logprobs == entries
    assert whole.queued_s == 0.5
    assert whole.usage == Usage(len(whole.prompt_ids), 2, 16)
    assert whole.usage.total_tokens == len(whole.prompt_ids) + 2
    assert whole.outputs[0].logprobs is None
