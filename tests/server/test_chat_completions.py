"""`/v1/chat/completions`, with the official client, `/tokenize` and `/detokenize`."""

import asyncio
from typing import Any

import openai
import pytest
from running_server import Server, Start

from fake_llm import tokenizer
from paceline.checkpoint.chat_template import chat_prompt

PATH = "/v1/chat/completions"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]


async def test_the_official_client(server: Server) -> None:
    reply = await server.client.chat.completions.create(model="fake", messages=HELLO, max_tokens=7)
    assert (reply.object, reply.model) == ("chat.completion", "fake")
    (choice,) = reply.choices
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "length", "assistant")
    assert choice.logprobs is None
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 7
    raw = await server.client.chat.completions.with_raw_response.create(
        model="fake", messages=HELLO, max_tokens=7, extra_headers={"X-Request-Id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.http_response.status_code == 200
    assert raw.parse().choices[0].finish_reason == "length"


async def test_the_synchronous_client(server: Server) -> None:
    def ask() -> tuple[str, str]:
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            whole = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=20, seed=3)
            stream = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=20, seed=3, stream=True)
            parts = [chunk.choices[0].delta.content or "" for chunk in stream]
        return whole.choices[0].message.content or "", "".join(parts)

    whole, streamed = await asyncio.to_thread(ask)
    assert whole == streamed
    assert len(whole) > 5


async def test_without_a_limit_the_context_is_the_limit(server: Server) -> None:
    reply = await server.ok(PATH, messages=HELLO)
    assert reply["usage"]["total_tokens"] == server.llm.limits.max_model_len
    assert reply["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n": 3, "logprobs": True, "top_logprobs": 2},
        {"logprobs": True, "stop": ["e", "o", "a"], "max_tokens": 100},
        {"max_completion_tokens": 1},
    ],
    ids=lambda options: ",".join(options),
)
async def test_deltas_join_to_the_whole_reply(server: Server, options: dict[str, Any]) -> None:
    """failure 5, failure 17, failure 19, failure 40, failure 41: for the chat shape, through the official client."""
    options = {"max_tokens": 50, "seed": 5, **options}
    if "max_completion_tokens" in options:
        del options["max_tokens"]
    whole = await server.client.chat.completions.create(model="fake", messages=HELLO, **options)
    stream = await server.client.chat.completions.create(
        model="fake", messages=HELLO, stream=True, stream_options={"include_usage": True}, **options
    )
    text: dict[int, str] = {}
    logprobs: dict[int, list[Any]] = {}
    finish: dict[int, str] = {}
    usages = []
    async for chunk in stream:
        assert chunk.object == "chat.completion.chunk"
        for choice in chunk.choices:
            assert choice.index not in finish
            assert choice.delta.role == ("assistant" if choice.index not in text else None)
            text[choice.index] = text.get(choice.index, "") + (choice.delta.content or "")
            if choice.logprobs is not None:
                logprobs.setdefault(choice.index, []).extend(choice.logprobs.content or [])
            if choice.finish_reason is not None:
                finish[choice.index] = choice.finish_reason
        if not chunk.choices:
            usages.append(chunk.usage)
        else:
            assert chunk.usage is None
    assert whole.usage is not None
    (usage,) = usages
    assert usage is not None
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(usage, name) == getattr(whole.usage, name)
    assert sorted(text) == [choice.index for choice in whole.choices] == list(range(options.get("n", 1)))
    for choice in whole.choices:
        assert text[choice.index] == choice.message.content
        assert finish[choice.index] == choice.finish_reason
        if choice.logprobs is not None:
            assert logprobs[choice.index] == choice.logprobs.content
    counted = sum(len(choice.logprobs.content or []) for choice in whole.choices if choice.logprobs)
    assert not options.get("logprobs") or counted == whole.usage.completion_tokens


@pytest.mark.parametrize(
    ("stream_options", "usage"),
    [({"include_usage": True}, True), ({"include_usage": False}, False), ({}, False), (None, False)],
)
async def test_usage_in_streams(start: Start, stream_options: Any, usage: bool) -> None:
    """failure 40: one more chunk, with no choices, only when asked for; also when the first token ends the reply."""
    server = await start(eos_ids=tuple(range(421)))
    events = await server.events(PATH, messages=HELLO, stream_options=stream_options)
    assert [len(event["choices"]) for event in events] == ([1, 0] if usage else [1])
    assert events[0]["choices"][0]["finish_reason"] == "stop"
    assert [event.get("usage") is not None for event in events] == ([False, True] if usage else [False])
    whole = await server.ok(PATH, messages=HELLO)
    if usage:
        assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    ("options", "k"), [({}, 0), ({"top_logprobs": 0}, 0), ({"top_logprobs": 1}, 1), ({"top_logprobs": 5}, 5)]
)
async def test_logprobs(server: Server, options: dict[str, int], k: int) -> None:
    """failure 16, failure 13: logprobs alone gives each token's own; else exactly k alternatives, all finite."""
    body = {"messages": HELLO, "max_tokens": 9, "seed": 1, "logprobs": True, "return_token_ids": True, **options}
    reply = await server.ok(PATH, **body)
    (choice,) = reply["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == 9
    for token, item in zip(choice["token_ids"], content, strict=True):
        assert item["logprob"] == -float(token)
        assert bytes(item["bytes"]).decode("utf-8", "replace") == item["token"]
        assert len(item["top_logprobs"]) == k
        if k:
            assert item["top_logprobs"][0] == {name: item[name] for name in ("token", "logprob", "bytes")}
        if k > 1:
            assert item["top_logprobs"][-1]["logprob"] == -9999.0
    joined = b"".join(bytes(item["bytes"]) for item in content)
    assert joined.decode("utf-8", "replace") == choice["message"]["content"]


async def test_prompt_logprobs(server: Server) -> None:
    """failure 13: also those of a chat prompt."""
    reply = await server.ok(PATH, messages=HELLO, max_tokens=1, prompt_logprobs=0, return_token_ids=True)
    ids = reply["prompt_token_ids"]
    assert [list(entry) for entry in reply["prompt_logprobs"][1:]] == [[str(token)] for token in ids[1:]]


async def test_one_bos_on_every_path(server: Server) -> None:
    """failure 34: the same ids by chat, by /tokenize and in Python, with exactly one BOS."""
    direct = chat_prompt(server.llm.tokenizer, server.llm.chat_template, HELLO)  # type: ignore[arg-type]
    chat = await server.ok(PATH, messages=HELLO, max_tokens=1, return_token_ids=True)
    tokenized = await server.ok("/tokenize", messages=HELLO)
    assert chat["prompt_token_ids"] == tokenized["tokens"] == direct == server.llm.submitted[-1].prompt
    assert direct.count(server.llm.tokenizer.bos_id) == 1
    assert chat["usage"]["prompt_tokens"] == tokenized["count"] == len(direct)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": [{"type": "text", "text": "weather in"}, {"type": "text", "text": "Paris"}]}],
        [*HELLO, {"role": "tool", "content": "weather: Paris", "tool_call_id": "call_1"}],
        [{"role": "user", "name": "ann", "content": "Paris weather", "refusal": None, "tool_calls": None}],
    ],
)
async def test_content_reaches_the_prompt(server: Server, messages: list[Any]) -> None:
    """failure 35: text parts and tool results are in the prompt, in the form that the template takes."""
    await server.ok(PATH, messages=messages, max_tokens=1)
    prompt = tokenizer().decode(server.llm.submitted[-1].prompt)
    assert "Paris" in prompt
    assert "weather" in prompt
    assert "'type'" not in prompt


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([*HELLO, *HELLO], "roles must alternate"),
        ([{"role": "wizard", "content": "x"}], "unknown role wizard"),
    ],
)
async def test_a_template_that_rejects(server: Server, messages: list[Any], text: str, stream: bool) -> None:
    """failure 37: a 400 with the template's own words, also before a stream; later requests work."""
    message = await server.refused(PATH, {"messages": messages, "stream": stream}, param="messages")
    assert text in message


async def test_continuing_the_last_message(server: Server) -> None:
    """failure 38: the prompt ends with the given text, trailing space included, and no end-of-turn token."""
    messages = [*HELLO, {"role": "assistant", "content": "The answer is  "}]
    await server.ok(PATH, messages=messages, continue_final_message=True, max_tokens=1)
    prompt = tokenizer().decode(server.llm.submitted[-1].prompt, skip_special_tokens=False)
    assert prompt.endswith("[assistant]The answer is  ")
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": True}
    await server.refused(PATH, body, param="continue_final_message")
    await server.refused(PATH, {"messages": HELLO, "continue_final_message": True}, param="messages")


async def test_template_variables(server: Server) -> None:
    """failure 88: only plain values for variables that the template uses; a request cannot bring a template."""
    await server.ok(PATH, messages=HELLO, chat_template_kwargs={"quiet": True}, max_tokens=1)
    assert tokenizer().decode(server.llm.submitted[-1].prompt).endswith("[assistant][quiet]")
    template = "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}"
    for kwargs in (
        {"chat_template": template},
        {"unknown": 1},
        {"quiet": [1]},
        {"quiet": "x" * 10_000},
        {"messages": ""},
    ):
        await server.refused(PATH, {"messages": HELLO, "chat_template_kwargs": kwargs}, param="chat_template_kwargs")
    await server.refused(PATH, {"messages": HELLO, "chat_template": template}, param="chat_template")
    await server.refused("/tokenize", {"messages": HELLO, "chat_template": template}, param="chat_template")


async def test_a_model_without_a_template(server: Server) -> None:
    server.service._encoder._template = None
    message = await server.refused(PATH, {"messages": HELLO}, param="messages")
    assert "/v1/completions" in message


async def test_rendering_leaves_the_loop_free(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """failure 88: while a prompt is rendered and tokenised other requests are answered."""
    import threading

    release, entered = threading.Event(), threading.Event()
    encode = server.llm.tokenizer.encode

    def slow(text: str, **options: Any) -> list[int]:
        if "slow" in text:
            entered.set()
            release.wait(10)
        return encode(text, **options)

    monkeypatch.setattr(server.llm.tokenizer, "encode", slow)
    waiting = asyncio.create_task(server.ok("/v1/completions", prompt="slow", max_tokens=1))
    await asyncio.to_thread(entered.wait, 10)
    await server.canary()
    assert (await server.http.get("/health")).status_code == 200
    assert not waiting.done()
    release.set()
    await waiting


async def test_tokenize(server: Server) -> None:
    reply = await server.ok("/tokenize", prompt="größer 中文", return_token_strs=True)
    ids = tokenizer().encode("größer 中文")
    assert (reply["tokens"], reply["count"], reply["max_model_len"]) == (ids, len(ids), 256)
    assert reply["token_strs"] == [tokenizer().token(token) for token in ids]
    assert await server.ok("/detokenize", tokens=ids) == {"prompt": "größer 中文"}
    special = await server.ok("/detokenize", tokens=[0, *ids])
    assert special["prompt"] == "<s>größer 中文"
    open_turn = await server.ok("/tokenize", messages=HELLO, add_generation_prompt=False)
    assert tokenizer().decode(open_turn["tokens"]) == "[user]hello\n"


async def test_tokenize_refuses(server: Server) -> None:
    """failure 32: ids to be decoded are checked as well."""
    for tokens in ([421], [-1], [2**62], [True], [1.5], "x", None):
        await server.refused("/detokenize", {"tokens": tokens})
    await server.refused("/tokenize", {}, param="prompt")
    await server.refused("/tokenize", {"prompt": "x", "messages": HELLO}, param="messages")
    await server.refused("/tokenize", {"messages": HELLO, "add_special_tokens": True}, param="add_special_tokens")
    await server.refused("/tokenize", {"prompt": "x", "model": "other"}, 404, "model")


async def test_mixed_streams_at_once(server: Server) -> None:
    """20 streams with different parameters: each says what it says alone."""

    def body(i: int) -> dict[str, Any]:
        options: list[dict[str, Any]] = [{}, {"n": 2}, {"logprobs": True, "top_logprobs": 1}, {"stop": ["e", "a"]}]
        messages = [{"role": "user", "content": f"question {i}"}]
        return {"messages": messages, "max_tokens": 10 + i, "seed": i, **options[i % 4]}

    def said(events: list[Any]) -> dict[int, tuple[str, Any]]:
        text: dict[int, tuple[str, Any]] = {}
        for event in events:
            for choice in event["choices"]:
                before = text.get(choice["index"], ("", None))[0]
                text[choice["index"]] = (before + choice["delta"]["content"], choice["finish_reason"])
        return text

    together = await asyncio.gather(*(server.events(PATH, **body(i)) for i in range(20)))
    for i, events in enumerate(together):
        whole = await server.ok(PATH, **body(i))
        assert said(events) == {
            choice["index"]: (choice["message"]["content"], choice["finish_reason"]) for choice in whole["choices"]
        }
    await server.idle()
