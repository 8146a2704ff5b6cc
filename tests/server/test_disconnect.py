"""Clients that leave, and engines that fail."""

import asyncio
import random
from typing import Any

import httpx
import pytest
from running_server import Server, Start, strict_json

from paceline.engine.output import Delta
from paceline.engine.request import Finish
from paceline.engine.sampling_params import SamplingParams
from paceline.ipc.stream import Receiver
from paceline.server.admission import Admission
from paceline.server.config import ServerConfig
from paceline.server.generation import Generation
from paceline.server.metrics import Metrics

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "hello", "max_tokens": 240, "ignore_eos": True}


async def until_open(server: Server, count: int) -> None:
    async with asyncio.timeout(10):
        while len(server.service._open) != count:  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("body", [LONG, {**LONG, "n": 3}, {**LONG, "prompt": ["a", "b"]}, {**LONG, "stream": True}])
async def test_a_client_that_leaves_aborts_its_request(
    start: Start, body: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    server = await start(delay_s=0.1)  # 240 steps would take longer than anyone here waits.
    task = asyncio.create_task(server.post(COMPLETIONS, body))
    await until_open(server, 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until_open(server, 0)
    await server.idle()
    await server.canary()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_client_that_leaves_while_it_sends(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    writer.write(head.encode() + b"{")
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.close()
    await server.canary()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_bug_in_an_open_stream(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error inside an open stream is an event, and the stream ends."""
    monkeypatch.setattr("paceline.server.completions.CompletionReply.choice", lambda *_, **__: 1 / 0)
    response = await server.post(COMPLETIONS, {**LONG, "stream": True})
    assert response.status_code == 200
    error = strict_json(response.text.removeprefix("data: "))["error"]
    assert (error["type"], error["code"]) == ("server_error", "engine_error")
    monkeypatch.undo()
    await server.idle()
    await server.canary()


async def test_leaving_a_stream(start: Start) -> None:
    server = await start(delay_s=0.1)
    async with server.http.stream("POST", COMPLETIONS, json={**LONG, "stream": True}) as response:
        async for line in response.aiter_lines():
            assert strict_json(line.removeprefix("data: "))["choices"]
            break
    await until_open(server, 0)
    await server.idle()
    assert server.llm.open_requests == 0


async def test_clients_that_leave_at_random(start: Start) -> None:
    """Queued, in prefill, in decode, at the end: whatever is left is nothing."""
    server = await start(delay_s=0.001, max_num_seqs=4, max_num_batched_tokens=8)
    rng = random.Random(5)

    async def client(i: int) -> None:
        body = {"prompt": "the quick brown fox " * rng.randint(1, 4), "max_tokens": rng.randint(1, 40)}
        body |= {"n": rng.randint(1, 3), "stream": rng.random() < 0.7}
        request = server.post(COMPLETIONS, body)
        if i % 4:
            assert (await request).status_code == 200
            return
        try:
            async with asyncio.timeout(rng.random() * 0.3):
                await request
        except TimeoutError:
            pass

    await asyncio.gather(*(client(i) for i in range(48)))
    await server.idle()
    await server.canary()


async def test_an_engine_that_dies(start: Start) -> None:
    """failure 82: open requests get an error, whole or in the stream; then everything but /version says 503."""
    server = await start(delay_s=0.01)
    whole = asyncio.create_task(server.post(COMPLETIONS, LONG))
    async with server.http.stream("POST", COMPLETIONS, json={**LONG, "stream": True}) as response:
        lines = response.aiter_lines()
        assert (await anext(lines)).startswith("data: ")
        await until_open(server, 2)
        server.llm.die("the engine process was ended by SIGKILL")
        rest = [line async for line in lines if line]
    error = strict_json(rest[-1].removeprefix("data: "))["error"]
    assert "SIGKILL" in error["message"]
    assert (error["type"], error["code"]) == ("server_error", "engine_unavailable")
    assert "[DONE]" not in "".join(rest)
    reply = await whole
    assert reply.status_code == 503
    assert "SIGKILL" in reply.json()["error"]["message"]
    health = await server.http.get("/health")
    assert health.status_code == 503
    assert "SIGKILL" in health.json()["error"]["message"]
    for body in (LONG, {**LONG, "stream": True}):
        assert (await server.post(COMPLETIONS, body)).status_code == 503
    assert (await server.http.get("/version")).status_code == 200
    assert (await server.http.get("/metrics")).status_code == 200
    assert server.service._admission.open == 0


async def test_a_stuck_engine_that_recovers(server: Server) -> None:
    """failure 82: /health follows the engine."""
    server.llm.error = "no sign of life from the engine for 5 s"
    assert (await server.http.get("/health")).status_code == 503
    server.llm.error = None
    assert (await server.http.get("/health")).status_code == 200
    await server.canary()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_fails_alone(server: Server, stream: bool) -> None:
    """A row's error is a 500, or an error event, of that request; its neighbours go on."""
    ids = [5] * 30
    server.llm.core._runner.fail_row_at[len(ids) + 3] = "x"  # type: ignore[attr-defined, index]
    neighbour = asyncio.create_task(server.ok(COMPLETIONS, prompt=[6] * 40, max_tokens=50, ignore_eos=True))
    body = {"prompt": ids, "max_tokens": 50, "ignore_eos": True, "stream": stream}
    response = await server.post(COMPLETIONS, body)
    if stream:
        assert response.status_code == 200
        events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert "[DONE]" not in events
        error = strict_json(events[-1])["error"]
        assert len(events) == 4
    else:
        assert response.status_code == 500
        error = response.json()["error"]
    assert "told to fail" in error["message"]
    assert (await neighbour)["usage"]["completion_tokens"] == 50
    await server.idle()
    await server.canary()


async def test_draining(start: Start) -> None:
    """failure 83: new requests get a 503, open ones end, and those that are not waited for get an error event."""
    server = await start(ServerConfig(), delay_s=0.05)
    short = asyncio.create_task(server.ok(COMPLETIONS, prompt="hello", max_tokens=10, ignore_eos=True))
    long = asyncio.create_task(server.post(COMPLETIONS, {**LONG, "stream": True}))
    whole = asyncio.create_task(server.post(COMPLETIONS, LONG))
    await until_open(server, 3)
    hurry = asyncio.get_running_loop().create_future()
    drain = asyncio.create_task(server.service.drain(60.0, hurry))
    await asyncio.sleep(0)
    for path in (COMPLETIONS, "/v1/chat/completions"):
        body = {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
        response = await server.post(path, body)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "shutting_down"
    assert (await server.http.get("/health")).status_code == 503
    assert (await short)["usage"]["completion_tokens"] == 10
    assert not drain.done()
    hurry.set_result(None)
    await drain
    events = [line.removeprefix("data: ") for line in (await long).text.split("\n\n") if line]
    assert strict_json(events[-1])["error"]["code"] == "shutting_down"
    assert all(strict_json(event)["choices"][0]["finish_reason"] is None for event in events[:-1])
    assert (await whole).status_code == 503
    await server.idle()


async def test_sequences_wait_until_their_own_first_token() -> None:
    """A prompt's first delta gives back the place of its candidate, not those of all candidates."""
    metrics = Metrics()
    admission = Admission(ServerConfig(), metrics)
    receivers: list[Receiver] = []

    def send(ids: list[int], params: SamplingParams, receiver: Receiver) -> int:
        receivers.append(receiver)
        return 0

    meter = metrics.request(0.0, [1], 3)
    ticket = admission.enter(1, 3)
    generation = Generation([[5]], SamplingParams(n=3), send, lambda _: None, ticket, meter, lambda _: None)
    waiting = []
    for delta in (
        Delta(candidate=0, ids=[7]),
        Delta(candidate=0, ids=[8]),
        Delta(candidate=2, ids=[7]),
        Delta(candidate=1, finish=Finish.LENGTH),
    ):
        receivers[0].put(delta)
        await generation.deltas()
        waiting.append(admission.waiting)
    assert waiting == [2, 2, 1, 0]
    receivers[0].end()
    assert await generation.deltas() == []
    generation.close()
    assert (admission.open, admission.waiting) == (0, 0)


async def test_a_slow_reader_holds_nobody_up(start: Start) -> None:
    server = await start(num_blocks=4096, max_model_len=2048)
    _, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]), limit=1024)
    body = httpx.Request("POST", server.url, json={**LONG, "max_tokens": 2000, "n": 8, "stream": True}).content
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    writer.write(head.encode() + b"\r\n\r\n" + body)
    await writer.drain()
    await until_open(server, 1)
    await server.canary()
    writer.close()
    await until_open(server, 0)
    await server.idle()
