"""Several API processes over one engine: they must look like one server."""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from running_server import strict_json
from served_process import LONG, children, ends, events, process, ready, until_draining

SHORT = {**LONG, "max_tokens": 40, "seed": 1}


def named(served: subprocess.Popen[str], module: str) -> list[psutil.Process]:
    found = []
    for child in children(served):
        with suppress(psutil.NoSuchProcess):
            found += [child] if module in child.cmdline() else []
    return found


def apis(served: subprocess.Popen[str]) -> list[psutil.Process]:
    return named(served, "paceline.server.api_process")


def engine(served: subprocess.Popen[str]) -> psutil.Process:
    return named(served, "paceline.ipc.process")[0]


@asynccontextmanager
async def each(served: subprocess.Popen[str], url: str) -> AsyncIterator[list[httpx.AsyncClient]]:
    """A client for each API process, with connections that this process has taken: the others stood still then."""
    clients = []
    try:
        for api in apis(served):
            client = httpx.AsyncClient(base_url=url, timeout=20)
            clients.append(client)
            others = [other for other in apis(served) if other.pid != api.pid]
            for other in others:
                other.suspend()
            await asyncio.gather(*(client.get("/version") for _ in range(4)))
            for other in others:
                other.resume()
        yield clients
    finally:
        for client in clients:
            await client.aclose()


async def metrics(client: httpx.AsyncClient) -> dict[str, float]:
    text = (await client.get("/metrics")).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {sample.name + "".join(f"[{v}]" for v in sample.labels.values()): sample.value for sample in samples}


async def until(condition: Callable[[], Any], within: float = 10.0) -> None:
    async with asyncio.timeout(within):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def opened(client: httpx.AsyncClient, body: dict[str, Any]) -> asyncio.Task[list[str]]:
    """A stream that has begun."""
    begun = asyncio.Event()
    task = asyncio.create_task(events(client, body, begun))
    await begun.wait()
    return task


async def test_they_are_one_server(tmp_path: Path) -> None:
    """The same request gives the same answer everywhere, and every process tells the metrics of all."""
    with process(tmp_path, api_processes=2) as served:
        url = await asyncio.to_thread(ready, served)
        assert (len(apis(served)), len(children(served))) == (2, 3)
        async with each(served, url) as clients:
            assert len(clients) == 2
            streams = [events(client, SHORT) for client in clients for _ in range(4)]
            texts = {
                "".join(strict_json(event)["choices"][0]["text"] for event in reply[:-1])
                for reply in await asyncio.gather(*streams)
            }
            assert len(texts) == 1
            assert len(texts.pop()) == 40
            assert (await clients[1].post("/v1/completions", json={})).status_code == 400
            for client in clients:
                values = await metrics(client)
                assert values["paceline_finished_total[length]"] == 8
                assert values["paceline_generation_tokens_total"] == 8 * 40
                assert values["paceline_ttft_seconds_count"] == values["paceline_e2e_seconds_bucket[+Inf]"] == 8
                assert values["paceline_refused_requests_total[400]"] == 1
                assert values["paceline_open_requests"] == values["paceline_unstarted"] == 0
                assert values["paceline_steps_total"] >= 40
                await until(lambda client=client: _is_idle(client))
        served.send_signal(signal.SIGTERM)
        await asyncio.to_thread(ends, served, 8)


async def _is_idle(client: httpx.AsyncClient) -> bool:
    return (await metrics(client))["paceline_running"] == 0


async def test_limits_are_the_servers(tmp_path: Path) -> None:
    """What one process has let in counts at the others."""
    with process(tmp_path, api_processes=2, max_concurrent=2) as served:
        url = await asyncio.to_thread(ready, served)
        async with each(served, url) as (one, other):
            streams = [await opened(one, LONG), await opened(other, LONG)]
            for client in (one, other):
                assert (await client.post("/v1/completions", json=LONG)).status_code == 429
                assert (await metrics(client))["paceline_open_requests"] == 2
            streams[0].cancel()
            await until(lambda: _is_served(other))
            streams[1].cancel()


async def _is_served(client: httpx.AsyncClient) -> bool:
    return (await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})).status_code == 200


async def test_one_dies(tmp_path: Path) -> None:
    """Its requests end in the engine, those of the others go on, and another one takes its place."""
    with process(tmp_path, api_processes=2) as served:
        url = await asyncio.to_thread(ready, served)
        before = apis(served)
        async with each(served, url) as (one, other):
            lost, kept = await opened(one, LONG), await opened(other, {**LONG, "max_tokens": 300})
            assert (await metrics(other))["paceline_running"] == 2
            before[0].kill()
            await asyncio.wait([lost])
            assert isinstance(lost.exception(), httpx.HTTPError)

            async def only_one_runs() -> bool:
                values = await metrics(other)
                return (values["paceline_running"], values["paceline_open_requests"]) == (1, 1)

            await until(only_one_runs)
            assert not kept.done()
            assert (await kept)[-1] == "[DONE]"

        async def replaced() -> bool:
            return len(apis(served)) == 2 and before[0].pid not in [api.pid for api in apis(served)]

        await until(replaced)
        async with each(served, url) as clients:
            for client in clients:
                assert (await events(client, SHORT))[-1] == "[DONE]"
                values = await metrics(client)
                assert values["paceline_finished_total[length]"] >= 2
                for gauge in (
                    "running",
                    "waiting",
                    "kv_used_ratio",
                    "open_requests",
                    "unstarted",
                    "idle_check_failures",
                ):
                    assert values[f"paceline_{gauge}"] == 0, gauge
        served.send_signal(signal.SIGTERM)
        assert "is started again" in await asyncio.to_thread(ends, served, 10)


async def test_the_engine_dies(tmp_path: Path) -> None:
    """failure 82: every process says so at once, and why."""
    with process(tmp_path, api_processes=2) as served:
        url = await asyncio.to_thread(ready, served)
        async with each(served, url) as clients:
            streams = [await opened(client, LONG) for client in clients]
            killed = time.monotonic()
            engine(served).kill()
            for stream in streams:
                assert "SIGKILL" in strict_json((await stream)[-1])["error"]["message"]
            assert time.monotonic() - killed < 5, "sooner than by a missing heartbeat"
            for client in clients:
                assert (await client.get("/health")).status_code == 503
                assert (await client.post("/v1/completions", json=LONG)).status_code == 503
        served.send_signal(signal.SIGTERM)
        await asyncio.to_thread(ends, served, 8)


async def test_all_drain(tmp_path: Path) -> None:
    """failure 83: a signal, to the whole group as from Ctrl-C, lets short requests of all processes end, and ends long
    ones with an error when the time is over; status 0 and no process left."""
    with process(tmp_path, api_processes=2, drain_timeout_s=3.0) as served:
        url = await asyncio.to_thread(ready, served)
        everyone = children(served)
        async with each(served, url) as clients:
            short = [await opened(client, {**LONG, "max_tokens": 60}) for client in clients]
            long = [await opened(client, LONG) for client in clients]
            os.killpg(served.pid, signal.SIGINT)
            for client in clients:
                await until_draining(client)
                assert (await client.post("/v1/completions", json=LONG)).status_code == 503
            for stream in short:
                assert (await stream)[-1] == "[DONE]"
            for stream in long:
                assert strict_json((await stream)[-1])["error"]["code"] == "shutting_down"
        await asyncio.to_thread(ends, served, 20)
        assert not any(child.is_running() for child in everyone)


async def test_a_second_signal_hurries_all(tmp_path: Path) -> None:
    """failure 83"""
    with process(tmp_path, api_processes=2, drain_timeout_s=60) as served:
        url = await asyncio.to_thread(ready, served)
        async with each(served, url) as clients:
            streams = [await opened(client, LONG) for client in clients]
            served.send_signal(signal.SIGTERM)
            for client in clients:
                await until_draining(client)
            assert not any(stream.done() for stream in streams)
            served.send_signal(signal.SIGTERM)
            for stream in streams:
                assert strict_json((await stream)[-1])["error"]["code"] == "shutting_down"
        await asyncio.to_thread(ends, served, 8)


async def test_nobody_is_left_when_the_parent_is_killed(tmp_path: Path) -> None:
    with process(tmp_path, api_processes=2) as served:
        await asyncio.to_thread(ready, served)
        everyone = children(served)
        served.kill()
        _, left = await asyncio.to_thread(psutil.wait_procs, everyone, 20)
        assert left == []


def test_keys_are_not_among_the_arguments(tmp_path: Path) -> None:
    with process(tmp_path, api_processes=2, api_keys=("secret-key",)) as served:
        url = ready(served)
        assert not any("secret-key" in " ".join(child.cmdline()) for child in children(served))
        assert httpx.get(f"{url}/version").status_code == 401
        assert httpx.get(f"{url}/version", headers={"Authorization": "Bearer secret-key"}).status_code == 200


def test_a_start_that_fails(tmp_path: Path) -> None:
    """An engine or a tokenizer that cannot load: the reason, status 1, and no process left."""
    with process(tmp_path, "broken", api_processes=2) as served:
        _, errors = served.communicate(timeout=60)
        assert served.returncode == 1
        assert "model.norm.weight is missing" in errors.splitlines()[-1]
    with process(tmp_path, api_processes=2) as served:
        (tmp_path / "tokenizer.json").write_text("{}")
        _, errors = served.communicate(timeout=60)
        assert served.returncode == 1
        assert "an API process cannot start" in errors
        assert "tokenizer.json" in errors


def test_a_signal_while_loading(tmp_path: Path) -> None:
    with process(tmp_path, "slow_to_load", api_processes=2) as served:
        deadline = time.monotonic() + 30
        while len(children(served)) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        everyone = children(served)
        served.send_signal(signal.SIGINT)
        ends(served, 15)
        psutil.wait_procs(everyone, 10)
        assert not any(child.is_running() for child in everyone)
