"""What is refused: a 4xx that names the field, and the next request works."""

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest
from running_server import Server, Start, strict_json

from fake_llm import VOCAB_SIZE
from paceline.checkpoint.chat_template import ChatTemplate
from paceline.server.config import ServerConfig

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]

SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}

NOT_SUPPORTED: list[tuple[str, Any]] = [
    ("response_format", {"type": "json_object"}),
    ("response_format", SCHEMA),
    ("structured_outputs", {"regex": "["}),
    ("guided_regex", "(?P<"),
    ("guided_json", {"type": "string", "pattern": "a", "maxLength": 8}),
    ("regex", ""),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tool_choice", "required"),
    ("functions", [{"name": "f"}]),
    ("function_call", {"name": "f"}),
    ("suffix", "end"),
    ("best_of", 2),
    ("audio", {"voice": "x"}),
    ("modalities", ["text", "audio"]),
    ("logits_processors", ["x"]),
    ("bad_words", ["x"]),
    ("use_beam_search", True),
    ("reasoning_effort", "high"),
    ("store", True),
    ("parallel_tool_calls", False),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
async def test_fields_that_are_not_supported_yet(server: Server, path: str, stream: bool) -> None:
    """failure 44, failure 46, failure 47, failure 11, failure 49, failure 50: structured output and tools are refused
    by name, never ignored."""
    good = {"prompt": "x"} if path == COMPLETIONS else {"messages": HELLO}
    for name, value in NOT_SUPPORTED:
        message = await server.refused(path, {**good, name: value, "min_tokens": 4, "stream": stream}, param=name)
        assert "not supported" in message
    message = await server.refused(path, {**good, "temprature": 0}, param="temprature")
    assert "not a field" in message
    await server.idle()


async def test_values_that_ask_for_nothing_pass(server: Server) -> None:
    nothing = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "best_of": 1, "suffix": ""}
    await server.ok(COMPLETIONS, prompt="x", max_tokens=1, **nothing, store=False, parallel_tool_calls=True)
    await server.refused(COMPLETIONS, {"prompt": "x", "best_of": True}, param="best_of")


BAD_FIELDS: list[tuple[str, Any, str]] = [
    ("n", 0, "1 to 128"),
    ("n", 129, "128"),
    ("n", True, "integer"),
    ("n", 1.5, "integer"),
    ("temperature", -0.1, "0 to"),
    ("temperature", "1", "number"),
    ("temperature", True, "number"),
    ("top_p", 1.1, "0 to 1"),
    ("top_k", -2, "not -2"),
    ("top_k", 10**30, "0 to 2147483647"),
    ("min_p", 2, "0 to 1"),
    ("presence_penalty", 3, "-2 to 2"),
    ("frequency_penalty", -3, "-2 to 2"),
    ("repetition_penalty", 0, "0.01"),
    ("seed", 2**63, "from"),
    ("seed", "1", "integer"),
    ("max_tokens", "x", "integer"),
    ("max_tokens", 10_000, "context of 256"),
    ("min_tokens", 17, "max_tokens"),
    ("min_tokens", -1, "not -1"),
    ("stop", 5, "string"),
    ("stop", [5], "string"),
    ("stop", [""], "non-empty"),
    ("stop", ["x"] * 65, "64"),
    ("stop_token_ids", [VOCAB_SIZE + 1000], "vocabulary"),
    ("stop_token_ids", [-1], "-1"),
    ("allowed_token_ids", [2**62], "4611686018427387904"),
    ("allowed_token_ids", [], "no token"),
    ("logit_bias", {str(VOCAB_SIZE): 1}, "vocabulary"),
    ("logit_bias", {"5": -100, "005": 100}, "twice"),
    ("logit_bias", {"1": 101}, "-100 to 100"),
    ("logit_bias", {"x": 1}, "token ids"),
    ("logit_bias", {"²": 1}, "token ids"),
    ("logit_bias", [1], "object"),
    ("prompt_logprobs", -1, "0 to 20"),
    ("prompt_logprobs", 21, "0 to 20"),
    ("prompt_logprobs", VOCAB_SIZE, "0 to 20"),
    ("stream", "yes", "boolean"),
    ("ignore_eos", 1, "boolean"),
    ("priority", 2**40, "from"),
    ("cache_salt", "x" * 300, "256"),
    ("user", 5, "string"),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_bad_fields(server: Server, path: str) -> None:
    """failure 28, failure 86, failure 31: out of range, of the wrong type, or beyond the vocabulary."""
    good: dict[str, Any] = {"prompt": "x"} if path == COMPLETIONS else {"messages": HELLO, "max_tokens": 16}
    submitted = 0
    for name, value, words in BAD_FIELDS:
        for stream in (False, True):
            body = {**good, "stream": stream, name: value}
            message = await server.refused(path, body)
            error = strict_json((await server.post(path, body)).content)["error"]
            assert error["param"].split(".")[0] == name, (body, error)
            assert words in message, (body, error)
            submitted += 1  # the canary
    assert len(server.llm.submitted) == submitted
    await server.idle()


BAD_PROMPTS: list[Any] = [
    [5, VOCAB_SIZE, 7],
    [-1],
    [2**62],
    [True],
    [1.0],
    [None],
    [5, "x"],
    [[5], 6],
    [[]],
    [],
    "",
    [""],
    None,
    5,
    {},
    [[5, [6]]],
    ["ok", [VOCAB_SIZE]],
    "the " * 300,
]


async def test_bad_prompts(server: Server) -> None:
    """failure 32: ids that are no ids, or outside the embedding, never reach the engine."""
    for prompt in BAD_PROMPTS:
        for stream in (False, True):
            await server.refused(COMPLETIONS, {"prompt": prompt, "stream": stream}, param="prompt")
    assert len(server.llm.submitted) == 2 * len(BAD_PROMPTS)  # the canaries
    await server.idle()


BAD_MESSAGES: list[tuple[Any, str]] = [
    (None, "messages"),
    ([], "messages"),
    ("hello", "messages"),
    (["hello"], "messages.0"),
    ([{"content": "x"}], "messages.0.role"),
    ([{"role": "", "content": "x"}], "messages.0.role"),
    ([{"role": 5, "content": "x"}], "messages.0.role"),
    ([{"role": "user"}], "messages.0.content"),
    ([{"role": "user", "content": None}], "messages.0.content"),
    ([{"role": "user", "content": 5}], "messages.0.content"),
    ([*HELLO, {"role": "user", "content": ["x"]}], "messages.1.content.0"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages.0.content.0.type"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text"),
    ([{"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}], "messages.0.content.0.y"),
    ([{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}], "messages.0.tool_calls"),
    ([{"role": "user", "content": "x" * 1_000_000}], "messages"),
    ([{"role": "user", "content": "the quick " * 200}], "messages"),
]


async def test_bad_messages(server: Server) -> None:
    for messages, param in BAD_MESSAGES:
        await server.refused(CHAT, {"messages": messages}, param=param)
    await server.idle()


async def test_min_tokens_that_cannot_be_reached(start: Start) -> None:
    server = await start(eos_ids=(1,))
    for path, good in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "x"})):
        ends = {**good, "min_tokens": 2, "max_tokens": 4, "allowed_token_ids": [1, 7], "stop_token_ids": [7]}
        await server.refused(path, ends, param="min_tokens")
        for change in ({"ignore_eos": True}, {"min_tokens": 0}, {"allowed_token_ids": [1, 7, 8]}):
            assert (await server.post(path, {**ends, **change})).status_code == 200
    await server.idle()


async def test_names_from_the_client_are_cut_in_errors(server: Server) -> None:
    for body in ({"prompt": "x", "k" * 100_000: 1}, {"prompt": "x", "stream": True, "stream_options": {"k" * 9999: 1}}):
        response = await server.post(COMPLETIONS, body)
        assert response.status_code == 400
        assert len(response.content) < 2500
    assert len((await server.post(COMPLETIONS, {"prompt": "x", "model": "m" * 100_000})).content) < 2500


async def test_long_lists_are_refused_at_once(start: Start) -> None:
    """One request must not hold up all others: what is long is refused before it is looked at."""
    server = await start(ServerConfig(max_messages=4))
    empty, part = {"role": "user", "content": ""}, {"type": "text", "text": "x"}
    turns = [{"role": role, "content": "x"} for role in ("user", "assistant", "user", "assistant")]
    await server.ok(CHAT, messages=turns, max_tokens=1)
    await server.ok(CHAT, messages=[{"role": "user", "content": [part] * 4}], max_tokens=1)
    many_parts = [{**turn, "content": [part] * 2} for turn in turns]
    for path in (CHAT, "/tokenize"):
        for messages in ([empty] * 5, [empty] * 100_000, many_parts, [{"role": "user", "content": [part] * 50_000}]):
            assert "most is 4" in await server.refused(path, {"messages": messages}, param="messages")
        for key in ("role", "name", "tool_call_id"):
            messages = [{**HELLO[0], key: "r" * 257}]
            assert "256" in await server.refused(path, {"messages": messages}, param=f"messages.0.{key}")
    for path, good in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "x"})):
        for name in ("stop_token_ids", "allowed_token_ids"):
            message = await server.refused(path, {**good, name: [1] * (VOCAB_SIZE + 1)}, param=name)
            assert "more than the vocabulary" in message
        biases = {str(token): 1 for token in range(1025)}
        message = await server.refused(path, {**good, "logit_bias": biases}, param="logit_bias")
        assert message == "logit_bias: has 1025 entries; the most is 1024"
    assert "300000 ids" in await server.refused(COMPLETIONS, {"prompt": [1] * 300_000}, param="prompt")
    assert "257 ids" in await server.refused("/detokenize", {"tokens": [1] * 257}, param="tokens")
    await server.idle()


async def test_what_a_template_makes_long_is_not_tokenised(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = await start()
    template = ChatTemplate("{% for m in messages %}{{ m.content * 1000 }}{% endfor %}")
    monkeypatch.setattr(server.service._encoder, "_template", template)
    for path in (CHAT, "/tokenize"):
        message = await server.refused(path, {"messages": [{"role": "user", "content": "x" * 100}]}, param="messages")
        assert message.startswith("messages: the prompt has 100000 characters, more than")


async def test_fields_that_do_not_fit_together(server: Server) -> None:
    """failure 16, failure 40: alternatives need logprobs; stream options need a stream."""
    chat = {"messages": HELLO}
    await server.refused(CHAT, {**chat, "top_logprobs": 2}, param="top_logprobs")
    await server.refused(CHAT, {**chat, "logprobs": True, "top_logprobs": 21}, param="top_logprobs")
    await server.refused(CHAT, {**chat, "logprobs": 1}, param="logprobs")
    await server.refused(COMPLETIONS, {"prompt": "x", "logprobs": True}, param="logprobs")
    await server.refused(COMPLETIONS, {"prompt": "x", "logprobs": 21}, param="logprobs")
    await server.refused(CHAT, {**chat, "max_tokens": 3, "max_completion_tokens": 4}, param="max_tokens")
    await server.refused(CHAT, {**chat, "max_tokens": 0}, param="max_tokens")
    await server.refused(CHAT, {**chat, "max_completion_tokens": 0}, param="max_completion_tokens")
    for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
        await server.refused(CHAT, {**chat, name: 10**9}, param=name)
    await server.refused(CHAT, {**chat, "stream_options": {"include_usage": True}}, param="stream_options")
    for options in (
        {"include_usage": 1},
        {"x": 1},
        {"include_obfuscation": True},
        {"continuous_usage_stats": True},
        {"continuous_usage_stats": 1},
    ):
        param = f"stream_options.{next(iter(options))}"
        await server.refused(CHAT, {**chat, "stream": True, "stream_options": options}, param=param)
    await server.refused(CHAT, {**chat, "stream": True, "stream_options": 5}, param="stream_options")
    for path, good in ((CHAT, chat), (COMPLETIONS, {"prompt": "x"})):
        await server.refused(path, {**good, "stream": True, "prompt_logprobs": 1}, param="prompt_logprobs")


BAD_BODIES: list[bytes] = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"5",
    b'"x"',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "temperature": Infinity}',
    b'{"prompt": "x", "temperature": 1e999}',
    b'{"prompt": "x", "logit_bias": {"1": -Infinity}}',
    b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    b'{"prompt": "x", "temperature": ' + b"9" * 400 + b"}",
    b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"prompt": "\xff"}',
]


async def test_bodies_that_are_no_request(server: Server) -> None:
    for body in BAD_BODIES:
        response = await server.http.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
        assert response.status_code == 400, body[:40]
        assert strict_json(response.content)["error"]["message"]
        await server.canary()


async def test_routes_and_methods(server: Server) -> None:
    cases = [
        ("GET", "/nothing", 404),
        ("GET", COMPLETIONS, 405),
        ("POST", "/health", 405),
        ("GET", "/v1/models/x", 404),
    ]
    for method, path, status in cases:
        response = await server.http.request(method, path)
        assert response.status_code == status
        assert strict_json(response.content)["error"]["code"]
    response = await server.http.post(COMPLETIONS, content=json.dumps({"prompt": "x"}))
    assert response.status_code == 415
    await server.canary()


async def test_models(start: Start) -> None:
    server = await start(ServerConfig(served_model_names=("org/one", "two")))
    models = await server.client.models.list()
    assert [model.id for model in models.data] == ["org/one", "two"]
    assert (await server.client.models.retrieve("org/one")).owned_by == "paceline"
    for name in ("org/one", "two"):
        assert (await server.ok(COMPLETIONS, prompt="x", model=name, max_tokens=1))["model"] == name
    assert (await server.ok(COMPLETIONS, prompt="x", max_tokens=1))["model"] == "org/one"
    for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": HELLO})):
        message = await server.refused(path, {**body, "model": "fake"}, 404, "model")
        assert "'org/one'" in message


async def test_body_size(start: Start) -> None:
    """A body over the limit is refused by its stated length and, without one, as it arrives."""
    server = await start(ServerConfig(max_body_bytes=10_000))
    message = await server.refused(COMPLETIONS, {"prompt": "x" * 10_000}, 413)
    assert "10000 bytes" in message

    sent = 0

    async def chunks() -> Any:
        nonlocal sent
        yield b'{"prompt": "'
        for _ in range(10_000):
            sent += 1
            yield b"x" * 1000
            await asyncio.sleep(0)
        yield b'"}'

    json_type = {"Content-Type": "application/json"}
    try:
        response = await server.http.post(COMPLETIONS, content=chunks(), headers=json_type)
        assert response.status_code == 413
    except (httpx.WriteError, httpx.ReadError):
        pass  # The server hung up while the client was still sending.
    assert sent < 10_000
    await server.canary()
    within = {"prompt": "x", "max_tokens": 1, "stop": "y" * 9000}
    assert (await server.post(COMPLETIONS, within)).status_code == 200


async def test_a_body_that_never_ends(start: Start) -> None:
    server = await start(ServerConfig(body_timeout_s=0.5))
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    writer.write(head.encode() + b"{")
    answer = await asyncio.wait_for(reader.read(), 5)
    assert answer.startswith(b"HTTP/1.1 408")
    writer.close()
    await server.canary()


async def test_limits_of_the_configuration(start: Start) -> None:
    """failure 86: caps that a deployment sets lower."""
    server = await start(ServerConfig(max_n=2, max_logprobs=1, max_prompts=2, max_waiting=3))
    await server.refused(COMPLETIONS, {"prompt": "x", "n": 3}, param="n")
    await server.refused(COMPLETIONS, {"prompt": "x", "logprobs": 2}, param="logprobs")
    await server.refused(COMPLETIONS, {"prompt": "x", "prompt_logprobs": 2}, param="prompt_logprobs")
    await server.refused(CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 2}, param="top_logprobs")
    await server.refused(COMPLETIONS, {"prompt": ["x"] * 3}, param="prompt")
    await server.refused(COMPLETIONS, {"prompt": ["x"] * 2, "n": 2}, param="n")


async def test_a_full_queue(start: Start) -> None:
    """Beyond the queue limit the answer is 429 with Retry-After; what was let in is served."""
    server = await start(ServerConfig(max_waiting=6), delay_s=0.001, max_num_seqs=2)
    release, step = threading.Event(), server.llm.core.step
    server.llm.core.step = lambda: step() if release.wait(20) else []  # type: ignore[method-assign]
    tasks = [
        asyncio.create_task(server.post(COMPLETIONS, {"prompt": f"p{i}", "n": 2, "max_tokens": 3})) for i in range(8)
    ]
    async with asyncio.timeout(10):
        for _, answered in zip(range(5), asyncio.as_completed(tasks), strict=False):
            refused = await answered
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert strict_json(refused.content)["error"]["type"] == "rate_limit_error"
    release.set()
    statuses = [reply.status_code for reply in await asyncio.gather(*tasks)]
    assert (statuses.count(200), statuses.count(429)) == (3, 5)
    await server.canary()
    await server.idle()


async def test_too_many_texts_to_tokenise(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = await start(ServerConfig(max_waiting=3, tokenizer_threads=1))
    release = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(server.llm.tokenizer, "encode", lambda *_, **__: release.wait(10) and [])
        tasks = [asyncio.create_task(server.post("/tokenize", {"prompt": "x"})) for _ in range(12)]
        async with asyncio.timeout(5):
            for _, refused in zip(range(9), asyncio.as_completed(tasks), strict=False):
                assert (await refused).status_code == 429
        release.set()
        statuses = [reply.status_code for reply in await asyncio.gather(*tasks)]
    assert statuses.count(200) == 3
    await server.canary()


async def test_too_many_at_once(start: Start) -> None:
    server = await start(ServerConfig(max_concurrent=1), delay_s=0.01)
    async with server.http.stream("POST", COMPLETIONS, json={"prompt": "x", "max_tokens": 200, "stream": True}) as one:
        assert one.status_code == 200
        two = await server.post(COMPLETIONS, {"prompt": "x"})
        assert two.status_code == 429
    await server.idle()
    await server.canary()
