"""`/v1/completions`, whole replies and streams."""

import asyncio
import json
from typing import Any

import pytest
from running_server import Server, Start, joined

from fake_llm import VOCAB_SIZE, tokenizer
from paceline.engine.output import OutputProcessor
from paceline.engine.request import CoreOutput, Finish
from paceline.server.app import create_app
from paceline.server.config import ServerConfig
from paceline.server.fields import NOT_YET, CompletionFields
from paceline.server.logprobs import TextOffsets, TokenTexts

PATH = "/v1/completions"


async def test_the_official_client(server: Server) -> None:
    reply = await server.client.completions.create(model="fake", prompt="the quick", max_tokens=5, seed=1)
    assert reply.object == "text_completion"
    assert reply.id.startswith("cmpl-")
    assert reply.model == "fake"
    assert [choice.finish_reason for choice in reply.choices] == ["length"]
    assert reply.usage is not None
    prompt_tokens = len(tokenizer().encode("the quick"))
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (prompt_tokens, 5)
    assert reply.usage.total_tokens == prompt_tokens + 5
    again = await server.client.completions.create(model="fake", prompt="the quick", max_tokens=5, seed=1)
    assert again.choices[0].text == reply.choices[0].text
    assert again.id != reply.id


async def test_the_text_is_that_of_the_tokens(server: Server) -> None:
    reply = await server.ok(PATH, prompt="hello", max_tokens=40, seed=3, return_token_ids=True)
    (choice,) = reply["choices"]
    request = server.llm.submitted[-1]
    processor = OutputProcessor(tokenizer().backend, request.prompt, request.params)
    assert choice["text"] == "".join(processor.push(output).text for output in _outputs(choice["token_ids"]))
    assert choice["prompt_token_ids"] == request.prompt == tokenizer().encode("hello")


def _outputs(ids: list[int]) -> list[CoreOutput]:
    last = len(ids) - 1
    return [
        CoreOutput(request=0, candidate=0, ids=[token], finish=Finish.LENGTH if i == last else None)
        for i, token in enumerate(ids)
    ]


VARIANTS: list[dict[str, Any]] = [
    {"prompt": "the quick brown fox"},
    {"prompt": "größer 中文", "logprobs": 3, "max_tokens": 60},
    {"prompt": "hello", "echo": True, "max_tokens": 12},
    {"prompt": "hello world", "echo": True, "logprobs": 2, "max_tokens": 12, "n": 3},
    {"prompt": ["hello", "dog", "fox"], "n": 2, "logprobs": 0, "max_tokens": 9},
    {"prompt": [[5, 6, 7], [8, 9]], "echo": True, "logprobs": 1, "max_tokens": 7, "n": 2},
    {"prompt": "stop", "stop": ["e", "o", "a", "i", "u"], "logprobs": 1, "max_tokens": 100},
    {"prompt": "stop", "stop": ["e", "o"], "include_stop_str_in_output": True, "max_tokens": 100},
    {"prompt": "stop", "stop": ["\ufffd\ufffd\ufffd"], "max_tokens": 150, "n": 4, "logprobs": 1},
    {"prompt": "score", "echo": True, "logprobs": 1, "max_tokens": 0},
    {"prompt": "end", "stop_token_ids": list(range(100, 200)), "max_tokens": 100, "logprobs": 1},
]


@pytest.mark.parametrize("body", VARIANTS, ids=lambda body: ",".join(body))
async def test_deltas_join_to_the_whole_reply(server: Server, body: dict[str, Any]) -> None:
    """failure 5, failure 17, failure 19, failure 40, failure 41: text, logprobs, ids, finish reasons and usage of a
    stream equal those of the whole reply."""
    body = {"seed": 11, "return_token_ids": True, **body}
    whole = await server.ok(PATH, **body)
    events = await server.events(PATH, **body, stream_options={"include_usage": True})
    assert events.pop() == {**events[0], "choices": [], "usage": {**whole["usage"]}}
    assert all(event["usage"] is None for event in events)
    choices = joined(events)
    assert [choices[index] for index in sorted(choices)] == whole["choices"]
    prompts = 1 if isinstance(body["prompt"], str) else len(body["prompt"])
    assert sorted(choices) == list(range(prompts * body.get("n", 1)))
    finishes = [chunk["finish_reason"] for event in events for chunk in event["choices"]]
    assert len(finishes) - finishes.count(None) == len(choices)
    counted = sum(len(choice["token_ids"]) for choice in whole["choices"])
    assert whole["usage"]["completion_tokens"] == counted
    if body.get("logprobs") is not None:
        for choice in whole["choices"]:
            echoed = len(choice["prompt_token_ids"]) if body.get("echo") else 0
            lengths = {len(values) for values in choice["logprobs"].values()}
            assert lengths == {echoed + len(choice["token_ids"])}
    await server.idle()


async def test_continuous_usage(server: Server) -> None:
    """Every chunk tells the tokens so far, and the last one all."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await server.events(PATH, prompt="the", max_tokens=12, ignore_eos=True, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert counts[-1] == counts[-2] == 12
    for event in events:
        usage = event["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


async def test_candidates_and_prompts(server: Server) -> None:
    """failure 19: indices are prompt-major, each candidate appears once, and their texts differ."""
    prompts = ["the", "quick", "brown"]
    reply = await server.ok(PATH, prompt=prompts, n=8, max_tokens=20, seed=5, echo=True)
    assert [choice["index"] for choice in reply["choices"]] == list(range(24))
    assert len({choice["text"] for choice in reply["choices"]}) == 24
    for choice in reply["choices"]:
        assert choice["text"].startswith(prompts[choice["index"] // 8])
        assert choice["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 24 * 20
    assert reply["usage"]["prompt_tokens"] == sum(len(tokenizer().encode(prompt)) for prompt in prompts)


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("fox", ["fox"]),
        (["fox", "dog"], ["fox", "dog"]),
        (tokenizer().encode("fox"), ["fox"]),
        ([tokenizer().encode("fox"), tokenizer().encode("dog")], ["fox", "dog"]),
        (["fox", tokenizer().encode("dog")], ["fox", "dog"]),
    ],
)
async def test_shapes_of_prompts(server: Server, prompt: Any, texts: list[str]) -> None:
    reply = await server.ok(PATH, prompt=prompt, max_tokens=1, echo=True)
    assert len(reply["choices"]) == len(texts)
    for choice, text in zip(reply["choices"], texts, strict=True):
        assert choice["text"].startswith(text)
    assert [request.prompt for request in server.llm.submitted] == [tokenizer().encode(text) for text in texts]


async def test_logprobs(server: Server) -> None:
    """failure 13: what cannot be written as JSON is clamped, in sampled, alternative and prompt logprobs."""
    body = {"prompt": "hello world", "echo": True, "logprobs": 3, "max_tokens": 8, "seed": 2, "prompt_logprobs": 3}
    reply = await server.ok(PATH, **body, return_token_ids=True)
    (choice,) = reply["choices"]
    ids = choice["prompt_token_ids"] + choice["token_ids"]
    logprobs = choice["logprobs"]
    texts = [tokenizer().backend.decode([token], skip_special_tokens=False) for token in ids]
    shown = zip(logprobs["tokens"], texts, strict=True)
    assert all(token == text or (token.startswith("bytes:\\x") and "\ufffd" in text) for token, text in shown)
    assert logprobs["token_logprobs"] == [None] + [-float(token) for token in ids[1:]]
    assert logprobs["top_logprobs"][0] is None
    for token, top in zip(ids[1:], logprobs["top_logprobs"][1:], strict=True):
        assert max(top.values()) == -float(token)
        assert min(top.values()) == -9999.0
        assert len(top) == 3
    prompt_logprobs = choice["prompt_logprobs"]
    assert prompt_logprobs[0] is None
    for token, entry in zip(choice["prompt_token_ids"][1:], prompt_logprobs[1:], strict=True):
        assert entry[str(token)] == {"logprob": -float(token), "rank": 1, "decoded_token": texts[ids.index(token)]}
        assert len(entry) == 3
        assert entry[str((token + 2) % VOCAB_SIZE)]["logprob"] == -9999.0


async def test_text_offsets_point_into_the_text(server: Server) -> None:
    reply = await server.ok(PATH, prompt="hello 中文", echo=True, logprobs=0, max_tokens=100, seed=4)
    (choice,) = reply["choices"]
    text, logprobs = choice["text"], choice["logprobs"]
    checked, after_part = 0, False
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        part = token.startswith("bytes:")
        if not part and not after_part:
            assert text[offset : offset + len(token)] == token
            checked += 1
        after_part = part
    assert checked > 30
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])


async def test_text_offsets_of_special_tokens(server: Server) -> None:
    """Special tokens that the prompt spells are in the echoed text; those of a prompt of ids are left out of it."""
    body = {"echo": True, "logprobs": 0, "max_tokens": 2, "return_token_ids": True}
    text = "<s>hello</s>the 中"
    (choice,) = (await server.ok(PATH, prompt=text, **body))["choices"]
    ids, logprobs = choice["prompt_token_ids"], choice["logprobs"]
    assert {0, 1} < set(ids)
    starts = [len(tokenizer().decode(ids[:i], skip_special_tokens=False)) for i in range(len(ids))]
    whole = [i for i, token in enumerate(logprobs["tokens"][: len(ids)]) if not token.startswith("bytes:")]
    assert [logprobs["text_offset"][i] for i in whole] == [starts[i] for i in whole]
    assert logprobs["text_offset"][len(ids)] == len(text)
    (choice,) = (await server.ok(PATH, prompt=[0, *tokenizer().encode("hello"), 1], **body))["choices"]
    assert choice["logprobs"]["text_offset"][:2] == [0, 0]
    assert choice["logprobs"]["text_offset"][-3:-1] == [5, 5]


def test_text_offsets_of_tokens_that_the_tokenizer_added() -> None:
    texts = TokenTexts(tokenizer().backend)
    ids = [0, *tokenizer().encode("hello"), 0, 1]  # <s> hello <s> </s>
    for text, last in (("hello", [5, 5]), ("hello<s>", [5, 8]), ("hello<s></s>", [5, 8])):
        offsets = TextOffsets(texts, skip_special_tokens=True)
        found = [offsets.next_of_text(token, text) for token in ids]
        assert found[:2] == [0, 0]
        assert found[-2:] == last


async def test_echo_without_new_tokens(server: Server) -> None:
    """failure 31: scoring a prompt gives its text and logprobs, and no new token."""
    reply = await server.ok(PATH, prompt="hello world", echo=True, logprobs=1, max_tokens=0)
    (choice,) = reply["choices"]
    assert choice["text"] == "hello world"
    assert choice["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 0
    ids = tokenizer().encode("hello world")
    assert choice["logprobs"]["token_logprobs"] == [None] + [-float(token) for token in ids[1:]]


async def test_max_tokens(server: Server) -> None:
    """failure 31: null is the default, 16, and a negative number is refused."""
    for body in ({"max_tokens": None}, {}):
        reply = await server.ok(PATH, prompt="hello", **body)
        assert reply["usage"]["completion_tokens"] == 16
    message = await server.refused(PATH, {"prompt": "hello", "max_tokens": -1}, param="max_tokens")
    assert "not -1" in message


async def test_stop_strings(server: Server) -> None:
    plain = (await server.ok(PATH, prompt="alphabet", max_tokens=100, seed=9))["choices"][0]["text"]
    stop = next(char for char in plain[10:] if char.isalpha() and char.isascii())
    body = {"prompt": "alphabet", "max_tokens": 100, "seed": 9, "stop": stop}
    (choice,) = (await server.ok(PATH, **body))["choices"]
    assert choice["text"] == plain[: plain.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    (choice,) = (await server.ok(PATH, **body, include_stop_str_in_output=True))["choices"]
    assert choice["text"] == plain[: plain.index(stop) + 1]
    await server.idle()


async def test_min_tokens_holds_against_stop_strings(server: Server) -> None:
    """failure 10: no stop string ends a reply before min_tokens."""
    stop = list("abcdefghijklmnopqrstuvwxyz")
    early = await server.ok(PATH, prompt="x", max_tokens=100, seed=9, stop=stop)
    assert early["usage"]["completion_tokens"] < 30
    late = await server.ok(PATH, prompt="x", max_tokens=100, seed=9, stop=stop, min_tokens=60)
    assert late["usage"]["completion_tokens"] >= 60
    full = await server.ok(PATH, prompt="x", max_tokens=100, seed=9, stop=stop, min_tokens=100)
    assert full["usage"]["completion_tokens"] == 100


@pytest.mark.parametrize("stream", [False, True])
async def test_end_of_sequence(start: Start, stream: bool) -> None:
    """failure 41, failure 17: at any of several end-of-sequence ids, one chunk says stop, and logprobs stay aligned."""
    server = await start(eos_ids=tuple(range(100, 140)))
    body = {"prompt": "hello", "max_tokens": 200, "seed": 1, "logprobs": 1, "return_token_ids": True}
    if stream:
        (choice,) = joined(await server.events(PATH, **body)).values()
    else:
        (choice,) = (await server.ok(PATH, **body))["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == choice["token_ids"][-1]
    assert choice["stop_reason"] in range(100, 140)
    assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"])
    longer = await server.ok(PATH, **{**body, "ignore_eos": True})
    assert longer["usage"]["completion_tokens"] == 200


async def test_every_token_is_a_chunk(start: Start) -> None:
    """A token whose text is held back still shows as a chunk, so that the first chunk is the first token."""
    server = await start(delay_s=0.002)
    events = await server.events(PATH, prompt="hello", max_tokens=30, seed=1, return_token_ids=True)
    chunks = [event["choices"][0] for event in events]
    assert len(chunks) >= 25
    assert all(chunk["token_ids"] for chunk in chunks)
    assert any(chunk["text"] == "" for chunk in chunks)


async def test_generation_defaults(start: Start) -> None:
    """The checkpoint's sampling defaults apply where the request says nothing, unless they are switched off."""
    sampling = {"temperature": 0.25, "top_k": 7}
    server = await start(sampling=sampling)
    await server.ok(PATH, prompt="a")
    await server.ok(PATH, prompt="a", temperature=0.5, top_k=-1)
    plain = await start(ServerConfig(generation_defaults=False), sampling=sampling)
    await plain.ok(PATH, prompt="a")
    used = [(request.params.temperature, request.params.top_k) for request in server.llm.submitted]
    assert used == [(0.25, 7), (0.5, 0)]
    assert plain.llm.submitted[0].params.temperature == 1.0


async def test_every_field_reaches_the_engine(server: Server) -> None:
    fields: dict[str, Any] = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.3,
        "seed": 7,
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "min_tokens": 2,
        "max_tokens": 3,
        "skip_special_tokens": False,
        "prompt_logprobs": 1,
        "logprobs": 2,
    }
    listed = {"stop": ["xyzzy"], "stop_token_ids": [5], "allowed_token_ids": [6, 7, 8]}
    extra = {"logit_bias": {"6": 1.5}, "priority": -3, "cache_salt": "mine", "user": "me"}
    await server.ok(PATH, prompt="hello", **fields, **listed, **extra)
    (request,) = server.llm.submitted
    assert {name: getattr(request.params, name) for name in fields} == fields
    assert {name: list(getattr(request.params, name)) for name in listed} == listed
    assert request.params.logit_bias == {6: 1.5}
    assert (request.priority, request.cache_salt) == (-3, "mine")


async def test_null_is_the_default(server: Server) -> None:
    nulls = {name: None for name in (*CompletionFields.model_fields, *NOT_YET) if name != "prompt"}
    await server.ok(PATH, prompt="hello", **nulls)
    await server.ok(PATH, prompt="hello")
    assert server.llm.submitted[0].params == server.llm.submitted[1].params


async def test_cached_tokens_are_reported(server: Server) -> None:
    prompt = "the quick brown fox jumps over the lazy dog"
    first = await server.ok(PATH, prompt=prompt, max_tokens=2)
    second = await server.ok(PATH, prompt=prompt, max_tokens=2)
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 0 < cached < second["usage"]["prompt_tokens"]


async def test_what_is_ready_goes_out_in_one_write(start: Start) -> None:
    """Eight candidates advance together: a step is one write, and the end is part of the last one."""
    server = await start(delay_s=0.002)
    body = json.dumps({"prompt": "hello", "n": 8, "max_tokens": 5, "stream": True, "ignore_eos": True}).encode()
    writes: list[bytes] = []
    requests = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return requests.pop() if requests else await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            writes.append(message["body"])

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    await create_app(server.llm, ServerConfig())(scope, receive, send)  # type: ignore[arg-type]
    assert b"".join(writes).count(b"data: ") == 8 * 5 + 1
    assert len(writes) <= 7
    assert writes[-1].endswith(b"data: [DONE]\n\n")
    assert b'"finish_reason":"length"' in writes[-1]
