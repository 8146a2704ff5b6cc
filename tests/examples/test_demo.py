"""The demo's meter, against a scripted server whose times are known, and the demo's ways to fail."""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from load_example import load

demo = load("demo")

Line = float | bytes | dict[str, Any]
DONE = b"data: [DONE]\n\n"


def say(text: str, tokens: int = 1, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text, **more}, "token_ids": [7] * tokens}]}


def usage(tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"completion_tokens": tokens}}


Serve = Callable[..., Any]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts a server that answers with the given script (seconds to wait, events, raw bytes); returns a client. When
    each part was about to be written is appended to ``writes``."""
    started: list[Any] = []

    async def start(*script: Line, status: int = 200, writes: list[float] | None = None) -> aiohttp.ClientSession:
        async def answer(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(status=status)
            await response.prepare(request)
            for line in script:
                if isinstance(line, float):
                    await asyncio.sleep(line)
                else:
                    if writes is not None:
                        writes.append(time.perf_counter())
                    await response.write(
                        line if isinstance(line, bytes) else b"data: %b\n\n" % json.dumps(line).encode()
                    )
            return response

        application = web.Application()
        application.router.add_post("/v1/chat/completions", answer)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        client = aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}")
        started.extend([client.close, runner.cleanup])
        return client

    yield start
    for stop in started:
        await stop()


async def measure(client: aiohttp.ClientSession) -> Any:
    return await demo.measure(client, "m", "hi", demo.time.perf_counter())


async def test_times_are_those_of_the_script(serve: Serve) -> None:
    """Public failure 97, public failure 100: a role is no token, a token without text is one; TPOT is
    (last - first) / (n - 1) of a request, where what follows the last token does not count. Each part is read after it
    was written, and before the next one, 0.1 s or more later, is."""
    writes: list[float] = []
    client = await serve(
        say("", 0, role="assistant"),
        0.2,
        say(""),
        0.1,
        say("ab"),
        0.1,
        say("c"),
        say("d", 2),
        0.3,
        say("", 0),
        usage(5),
        DONE,
        writes=writes,
    )
    began = time.perf_counter()
    sample = await demo.measure(client, "m", "hi", began - 0.1)  # It was due before it is sent at all.
    assert sample.error == ""
    assert sample.tokens == 5
    _, a, b, _, d, role, *_ = writes
    assert a < sample.first < b
    assert sample.ttft == pytest.approx(sample.first - began + 0.1)
    assert (d - b) / 4 < sample.tpot < (role - a) / 4
    assert b - a >= 0.1
    assert role - d >= 0.3


async def test_one_token_has_no_tpot(serve: Serve) -> None:
    """Public failure 98: not measured, never 0."""
    sample = await measure(await serve(say("a"), usage(1), DONE))
    assert sample.error == ""
    assert sample.ttft is not None
    assert sample.tpot is None


@pytest.mark.parametrize(
    ("script", "status", "error"),
    [
        ([say("a"), {"error": {"message": "died"}}, DONE], 200, "error event: {'message': 'died'}"),
        ([say("a"), usage(1)], 200, "the stream ended early"),
        ([say("", 0), usage(0), DONE], 200, "the answer has no token"),
        ([b'{"error": {"message": "full"}}'], 429, 'HTTP 429: {"error": {"message": "full"}}'),
    ],
)
async def test_a_failure_is_a_failure(script: list[Line], status: int, error: str, serve: Serve) -> None:
    """Public failure 94: an error event inside a 200, and a stream that ends early, are no successes."""
    sample = await measure(await serve(*script, status=status))
    assert sample.error == error


async def test_a_server_that_is_gone_is_a_failure() -> None:
    async with aiohttp.ClientSession("http://127.0.0.1:1") as client:
        assert "Cannot connect" in (await measure(client)).error


def test_the_table_counts_failures_and_what_was_not_measured() -> None:
    samples = [
        demo.Sample(scheduled=0.0, first=1.0, last=3.0, tokens=5),
        demo.Sample(scheduled=0.0, first=2.0, last=2.0, tokens=1),
        demo.Sample(scheduled=0.0, first=0.1, last=9.0, tokens=900, error="the stream ended early"),
    ]
    table = demo.table(samples)
    rows = {name: list(figures) for name, *figures in zip(*(column.cells for column in table.columns), strict=True)}
    assert rows["TTFT"] == ["1,500.0 ms", "1,500.0 ms", "1,900.0 ms", "2,000.0 ms", "2 of 3"]
    assert rows["TPOT"] == ["500.0 ms", "500.0 ms", "500.0 ms", "500.0 ms", "1 of 3"]
    expected = "2 completed, 1 failed; 6 output tokens in 3.00 s: throughput 2.0 tokens/s"
    assert demo.summary(samples) == expected


def test_failures_alone_have_no_times() -> None:
    samples = [demo.Sample(scheduled=0.0, error="refused")]
    cells = [next(iter(column.cells)) for column in demo.table(samples).columns]
    assert cells == ["TTFT", "-", "-", "-", "-", "0 of 1"]
    assert demo.summary(samples) == "0 completed, 1 failed"


def test_a_server_that_cannot_start_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["demo.py", "no/such/folder/"])
    assert demo.main() == 1
    output = capsys.readouterr().out
    assert "the server ended with status 1 while it started" in output
    assert "no model at 'no/such/folder/'" in output
