"""The server over the real engine process with a real model, tiny and random."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from running_server import Server, joined, running
from transformers import PreTrainedModel

from paceline import AsyncLLM
from paceline.engine.config import EngineConfig
from paceline.server.config import ServerConfig
from tiny_models import IM_END_ID, make_tiny, tiny_tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("models") / "llama"
    return folder, make_tiny(folder, "llama")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(model: tuple[Path, PreTrainedModel]) -> AsyncIterator[Server]:
    engine = EngineConfig(
        model=str(model[0]), dtype="float32", threads=1, kv_cache_bytes=4 << 20, max_num_batched_tokens=32
    )
    llm = AsyncLLM(engine)
    async with running(llm, ServerConfig(served_model_names=("tiny",))) as server:  # type: ignore[arg-type]
        yield server
        async with asyncio.timeout(5):
            await server.service._idle.wait()
        assert llm.open_requests == 0
        assert llm.leaks == 0


async def test_tokens_and_logprobs_are_the_models(server: Server, model: tuple[Path, PreTrainedModel]) -> None:
    """Greedy tokens and log-probabilities, of prompt and output, against transformers."""
    body = {"prompt": "hello world and the user", "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    reply = await server.ok(COMPLETIONS, **body, echo=True, logprobs=3, return_token_ids=True)
    (choice,) = reply["choices"]
    ids = choice["prompt_token_ids"] + choice["token_ids"]
    with torch.inference_mode():
        reference = model[1](torch.tensor([ids])).logits[0].log_softmax(-1)
    prompt_len = len(choice["prompt_token_ids"])
    assert choice["token_ids"] == reference[prompt_len - 1 : -1].argmax(-1).tolist()
    expected = [float(reference[i, token]) for i, token in enumerate(ids[1:])]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(expected, abs=1e-3)
    for i, top in enumerate(choice["logprobs"]["top_logprobs"][1:]):
        best = reference[i].topk(3).values.tolist()
        assert sorted(top.values(), reverse=True)[:3] == pytest.approx(best, abs=1e-3)
    assert choice["text"] == body["prompt"] + tiny_tokenizer().decode(choice["token_ids"])


async def test_scoring(server: Server, model: tuple[Path, PreTrainedModel]) -> None:
    """failure 31: echo with max_tokens=0 scores the prompt and generates nothing."""
    ids = tiny_tokenizer().encode("the world and hello").ids
    with torch.inference_mode():
        reference = model[1](torch.tensor([ids])).logits[0].log_softmax(-1)
    reply = await server.ok(COMPLETIONS, prompt=ids, echo=True, max_tokens=0, logprobs=0)
    expected = [float(reference[i, token]) for i, token in enumerate(ids[1:])]
    assert reply["choices"][0]["logprobs"]["token_logprobs"][1:] == pytest.approx(expected, abs=1e-3)
    assert reply["choices"][0]["text"] == "the world and hello"
    assert reply["usage"]["completion_tokens"] == 0


VARIANTS: list[dict[str, Any]] = [
    {"prompt": "hello", "max_tokens": 40, "seed": 3, "n": 3, "logprobs": 2},
    {"prompt": ["the user", [5, 6, 7]], "max_tokens": 30, "seed": 1, "n": 2, "echo": True, "logprobs": 1},
    {"prompt": "x", "max_tokens": 60, "seed": 2, "temperature": 1.5, "stop": ["a", "e", "i"], "logprobs": 0},
    {"prompt": "y", "max_tokens": 20, "top_k": 1, "logprobs": 5, "echo": True},
    {"prompt": "z", "max_tokens": 20, "seed": 4, "allowed_token_ids": [9, 10, 11], "logprobs": 5},
    {"prompt": "p", "max_tokens": 30, "seed": 5, "presence_penalty": 1, "repetition_penalty": 1.2, "top_p": 0.9},
]


async def test_deltas_join_to_the_whole_reply(server: Server) -> None:
    """failure 5, failure 13, failure 17, failure 19, failure 41: streams, all at once, say what whole replies say."""
    variants = [{"return_token_ids": True, **body} for body in VARIANTS]
    streams = await asyncio.gather(*(server.events(COMPLETIONS, **body) for body in variants))
    for body, events in zip(variants, streams, strict=True):
        whole = await server.ok(COMPLETIONS, **body)
        choices = joined(events)
        said = [choices[index] for index in sorted(choices)]
        for choice, expected in zip(said, whole["choices"], strict=True):
            for name in ("index", "text", "token_ids", "finish_reason", "stop_reason"):
                assert choice[name] == expected[name]
            if body.get("logprobs") is not None:
                for name in ("tokens", "text_offset"):
                    assert choice["logprobs"][name] == expected["logprobs"][name]
                values, others = choice["logprobs"]["token_logprobs"], expected["logprobs"]["token_logprobs"]
                assert [v for v in values if v is not None] == pytest.approx(
                    [v for v in others if v is not None], abs=1e-4
                )


async def test_ends(server: Server) -> None:
    """failure 10, failure 41: the model's own end, at any of its ids, and not before min_tokens."""
    body = {"messages": HELLO, "max_tokens": 400, "logit_bias": {str(IM_END_ID): 5}, "seed": 1}
    early = await server.ok(CHAT, **body)
    assert early["choices"][0]["finish_reason"] == "stop"
    assert early["choices"][0]["stop_reason"] == IM_END_ID
    assert early["usage"]["completion_tokens"] < 100
    late = await server.ok(CHAT, **body, min_tokens=150)
    assert late["usage"]["completion_tokens"] >= 150
    events = await server.events(CHAT, **body)
    assert [e["choices"][0]["finish_reason"] for e in events if e["choices"][0]["finish_reason"]] == ["stop"]


async def test_bad_requests_and_clients_that_leave(server: Server) -> None:
    """failure 28, failure 32: what the engine must never see it does not see, and it goes on."""
    rows = len(tiny_tokenizer().get_vocab())
    for body in (
        {"prompt": [rows]},
        {"prompt": "x", "stop_token_ids": [rows], "min_tokens": 1},
        {"prompt": "x " * 600},
    ):
        await server.refused(COMPLETIONS, body)
    long = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True}
    tasks = [asyncio.create_task(server.post(COMPLETIONS, {**long, "stream": i % 2 == 0})) for i in range(10)]
    await asyncio.sleep(0.2)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await server.canary()
