"""Chunks of a stream: those made from a template are those that are made in full."""

import pytest

from fake_llm import tokenizer
from paceline.engine.output import Delta
from paceline.engine.request import Finish
from paceline.engine.sampling_params import SamplingParams
from paceline.engine.step import TokenLogprobs
from paceline.server.chat import ChatReply
from paceline.server.completions import CompletionReply
from paceline.server.fields import ChatFields, CompletionFields
from paceline.server.logprobs import TokenTexts
from paceline.server.prompts import Prompt
from paceline.server.reply import Reply, event

TEXTS = ["one", "", ' "two"\n\\', "\u2028 中 \U0001f600", "text of", "\x00"]
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
CONTINUOUS = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def completion(**fields: object) -> Reply:
    prompts = [Prompt([1, 2], "ab", True), Prompt([3], "c", True)]
    parsed = CompletionFields.model_validate({"echo": True, **fields})
    return CompletionReply(parsed, prompts, SamplingParams(n=2), 'a "model"', TokenTexts(tokenizer().backend))


def chat(**fields: object) -> Reply:
    parsed = ChatFields.model_validate(fields)
    prompt = Prompt([1, 2], None, False)
    return ChatReply(parsed, prompt, SamplingParams(n=2), "text of", TokenTexts(tokenizer().backend))


@pytest.mark.parametrize("make", [completion, chat])
@pytest.mark.parametrize("fields", [{}, USAGE, CONTINUOUS, {"return_token_ids": True}, {"logprobs": True}])
def test_templates_change_nothing(make: type[Reply], fields: dict[str, object]) -> None:
    if make is completion and "logprobs" in fields:
        fields = {"logprobs": 1, "echo": False}
    fast, slow = make(**fields), make(**fields)
    slow._head = fast._head
    logprobs = [TokenLogprobs(-1.0, 1, [9], [-1.0])] if "logprobs" in fields else None
    for prompt in range(len(fast.prompts)):
        for number, text in enumerate(TEXTS):
            for candidate in (1, 0):
                last = number == len(TEXTS) - 1
                delta = Delta(
                    candidate=candidate,
                    text=text,
                    ids=[9],
                    logprobs=logprobs,
                    finish=Finish.STOP if last else None,
                    stop="x" if last else None,
                    cached_tokens=1 if number == 0 else 0,
                )
                assert fast.events(prompt, delta) == b"".join(map(event, slow.chunks(prompt, delta)))
    assert fast.last_chunks() == slow.last_chunks()
    assert bool(fast._frames) == (fields in ({}, USAGE, CONTINUOUS))
