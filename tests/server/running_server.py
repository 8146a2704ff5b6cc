"""A server on a free port of this machine, in the event loop of the test, over a `FakeLLM`."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import uvicorn

from fake_llm import FakeLLM
from paceline.server.app import create_app
from paceline.server.config import ServerConfig
from paceline.server.service import Service


def strict_json(text: str | bytes) -> Any:
    """Parses what a strict parser takes: no NaN, no Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def joined(events: list[Any]) -> dict[int, dict[str, Any]]:
    """Choices as the concatenation of their chunks: text, logprobs, ids and finish."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for chunk in event["choices"]:
            whole = choices.setdefault(
                chunk["index"], {"index": chunk["index"], "text": "", "logprobs": None, "token_ids": []}
            )
            assert whole.get("finish_reason") is None, "a chunk after the last one"
            whole["text"] += chunk["text"]
            whole["token_ids"] += chunk.get("token_ids", [])
            for name, values in (chunk["logprobs"] or {}).items():
                whole["logprobs"] = whole["logprobs"] or {}
                whole["logprobs"].setdefault(name, []).extend(values)
            whole |= {name: chunk[name] for name in ("finish_reason", "stop_reason")}
            whole |= {name: chunk[name] for name in ("prompt_token_ids",) if name in chunk}
    return choices


@dataclass
class Server:
    """What a test needs of a running server."""

    llm: FakeLLM
    service: Service
    url: str
    http: httpx.AsyncClient
    client: openai.AsyncOpenAI

    async def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return await self.http.post(path, json=body, **options)

    async def ok(self, path: str, **body: Any) -> Any:
        """The reply to a request that must succeed."""
        response = await self.post(path, body)
        assert response.status_code == 200, response.text
        return strict_json(response.content)

    async def refused(self, path: str, body: Any, status: int = 400, param: str | None = None) -> str:
        """The message of a request that must fail; checks the error's shape and that the server still works."""
        response = await self.post(path, body)
        assert response.status_code == status, response.text
        error = strict_json(response.content)["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        if param is not None:
            assert error["param"] == param, error
        await self.canary()
        return error["message"]

    async def canary(self) -> None:
        """A good request after a bad one succeeds."""
        reply = await self.ok("/v1/completions", prompt="canary", max_tokens=2, ignore_eos=True)
        assert reply["usage"]["completion_tokens"] == 2

    async def events(self, path: str, **body: Any) -> list[Any]:
        """The chunks of a stream, which must end with [DONE]."""
        async with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            text = (await response.aread()).decode()
            assert response.status_code == 200, text
        events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert events.pop() == "[DONE]"
        return [strict_json(event) for event in events]

    async def idle(self) -> None:
        """Nothing is left of any request."""
        await self.llm.check_idle()
        async with asyncio.timeout(10):
            await self.service._idle.wait()
        assert not self.service._open
        assert (self.service._admission.open, self.service._admission.waiting) == (0, 0)


@asynccontextmanager
async def running(llm: FakeLLM, config: ServerConfig) -> AsyncIterator[Server]:
    await llm.start()
    app = create_app(llm, config)  # type: ignore[arg-type]
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    settings = uvicorn.Config(
        app, loop="none", http="httptools", ws="none", lifespan="off", log_level="warning", root_path=config.root_path
    )
    uvicorn_server = uvicorn.Server(settings)
    task = asyncio.create_task(uvicorn_server._serve([listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    key = config.api_keys[0] if config.api_keys else "none"
    headers = {"Authorization": f"Bearer {key}"}
    try:
        async with (
            httpx.AsyncClient(base_url=url, headers=headers, timeout=20) as http,
            openai.AsyncOpenAI(base_url=url + "/v1", api_key=key, max_retries=0, timeout=20) as client,
        ):
            yield Server(llm, app.state.service, url, http, client)
    finally:
        # uvicorn's own shutdown polls; that takes a while, and test_serve.py has it.
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for listening in uvicorn_server.servers:
            listening.close()
        app.state.service.close()
        await llm.close()


Start = Callable[..., Awaitable[Server]]
