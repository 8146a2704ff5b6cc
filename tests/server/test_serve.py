"""`serve` in a process of its own: start, signals, exit."""

import asyncio
import os
import resource
import signal
import socket
import subprocess
import time
from contextlib import closing
from pathlib import Path

import httpx
import psutil
import pytest
from running_server import strict_json
from served_process import LONG, children, ends, events, process, ready, until_draining

from paceline.server.serve import default_processes


async def test_a_signal_drains(tmp_path: Path) -> None:
    """failure 83: 20 streams, SIGTERM: new requests get a 503, short ones end as they should, long ones get an error
    event when the time is over; status 0 and no process left."""
    with process(tmp_path, drain_timeout_s=3.0) as served:
        url = await asyncio.to_thread(ready, served)
        engine = children(served)
        assert len(engine) == 1
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            opened = [asyncio.Event() for _ in range(20)]
            bodies = [{**LONG, "max_tokens": 60} if i % 2 else LONG for i in range(20)]
            streams = [
                asyncio.create_task(events(client, body, event)) for body, event in zip(bodies, opened, strict=True)
            ]
            await asyncio.gather(*(event.wait() for event in opened))
            before = time.monotonic()
            served.send_signal(signal.SIGTERM)
            await until_draining(client)
            refused = await client.post("/v1/completions", json=LONG)
            assert refused.status_code == 503
            replies = await asyncio.gather(*streams)
        for i, reply in enumerate(replies):
            if i % 2:
                assert reply[-1] == "[DONE]"
                assert strict_json(reply[-2])["choices"][0]["finish_reason"] == "length"
            else:
                assert strict_json(reply[-1])["error"]["code"] == "shutting_down"
        await asyncio.to_thread(ends, served, 20)
        assert time.monotonic() - before >= 3.0
        assert not any(child.is_running() for child in engine)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_hurries(tmp_path: Path, number: signal.Signals) -> None:
    """failure 83: the second signal ends the wait; clients still get their error event."""
    with process(tmp_path, drain_timeout_s=60) as served:
        url = await asyncio.to_thread(ready, served)
        engine = children(served)
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            opened = asyncio.Event()
            stream = asyncio.create_task(events(client, LONG, opened))
            await opened.wait()
            os.killpg(served.pid, number)  # As Ctrl-C does: the engine process gets it too.
            await until_draining(client)
            await asyncio.sleep(0.1)
            assert served.poll() is None
            assert not stream.done()
            served.send_signal(number)
            assert strict_json((await stream)[-1])["error"]["code"] == "shutting_down"
        await asyncio.to_thread(ends, served, 8)
        assert not any(child.is_running() for child in engine)


async def test_an_idle_server_ends_at_once(tmp_path: Path) -> None:
    with process(tmp_path) as served:
        url = await asyncio.to_thread(ready, served)
        async with httpx.AsyncClient(base_url=url) as client:
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
            reply = await client.post("/v1/chat/completions", json=body)
            assert reply.status_code == 200
            assert reply.json()["model"] == str(tmp_path)
            served.send_signal(signal.SIGTERM)  # With a connection that is kept alive.
            await asyncio.to_thread(ends, served, 8)


async def test_the_engine_is_killed_or_hangs(tmp_path: Path) -> None:
    """failure 82: within seconds /health says 503 and waiting clients get an error, be the engine hung or dead; a hung
    one that goes on is healthy again."""
    with process(tmp_path) as served:
        url = await asyncio.to_thread(ready, served)
        (engine,) = children(served)

        async def health() -> int:
            return (await client.get("/health")).status_code

        async def becomes(status: int) -> None:
            async with asyncio.timeout(30):
                while await health() != status:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)

        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            opened = asyncio.Event()
            stream = asyncio.create_task(events(client, LONG, opened))
            await opened.wait()
            engine.suspend()
            await becomes(503)
            assert strict_json((await stream)[-1])["error"]["code"] == "engine_unavailable"
            assert (await client.post("/v1/completions", json=LONG)).status_code == 503
            engine.resume()
            await becomes(200)
            opened.clear()
            stream = asyncio.create_task(events(client, LONG, opened))
            await opened.wait()
            engine.kill()
            await becomes(503)
            assert "SIGKILL" in strict_json((await stream)[-1])["error"]["message"]
        served.send_signal(signal.SIGTERM)
        await asyncio.to_thread(ends, served, 8)


def test_a_signal_while_loading(tmp_path: Path) -> None:
    with process(tmp_path, "slow_to_load") as served:
        deadline = time.monotonic() + 30
        while not children(served):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.5)
        engine = children(served)
        served.send_signal(signal.SIGINT)
        ends(served, 15)
        assert not any(child.is_running() for child in engine)


def fails(served: subprocess.Popen[str]) -> str:
    output, errors = served.communicate(timeout=60)
    assert served.returncode == 1
    assert output == ""
    assert "Traceback" not in errors.splitlines()[-1]
    return errors.splitlines()[-1]


def test_a_port_in_use(tmp_path: Path) -> None:
    """Known before the model loads."""
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        with process(tmp_path, "slow_to_load", port=port) as served:
            message = fails(served)
    assert f"127.0.0.1 port {port}" in message
    assert "--port" in message


def test_an_address_of_another_machine(tmp_path: Path) -> None:
    with process(tmp_path, "slow_to_load", host="203.0.113.1") as served:
        assert "203.0.113.1" in fails(served)
    with process(tmp_path, "slow_to_load", host="no.such.host.invalid") as served:
        assert "no.such.host.invalid" in fails(served)


def test_an_engine_that_cannot_load(tmp_path: Path) -> None:
    with process(tmp_path, "broken") as served:
        assert "model.norm.weight is missing" in fails(served)


async def test_only_the_given_address_listens(tmp_path: Path) -> None:
    """failure 85: one TCP socket, on this machine's own address; the link to the engine is no TCP port."""
    with process(tmp_path) as served:
        url = await asyncio.to_thread(ready, served)
        listening = [
            connection.laddr
            for each in [psutil.Process(served.pid), *children(served)]
            for connection in each.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert [f"http://{ip}:{port}" for ip, port in listening] == [url]
        served.send_signal(signal.SIGTERM)
        await asyncio.to_thread(ends, served, 8)


def test_as_many_connections_as_the_system_allows(tmp_path: Path) -> None:
    """The soft limit of open files, often 1,024, is raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
    try:
        with process(tmp_path) as served:
            ready(served)
            assert psutil.Process(served.pid).rlimit(psutil.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_api_processes_by_default() -> None:
    """Small machines have one."""
    assert [default_processes(cores) for cores in (1, 2, 7, 8, 15, 16, 128)] == [1, 1, 1, 2, 3, 4, 4]
