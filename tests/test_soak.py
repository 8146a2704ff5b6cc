"""A crowd of clients, many of which leave early, against a server process with a tiny model."""

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import aiohttp
import pytest

from tiny_models import make_tiny

REQUESTS = 2000
STREAMS = 200
GROWTH_MIB = 24
"""What 1,500 requests may add after the first 500: noise of allocators, far less than a leak of one reply each."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "llama"
    make_tiny(folder, "llama", max_position_embeddings=256)
    arguments = ["--port", "0", "--kv-cache-bytes", "4MiB", "--threads", "1", "--max-num-batched-tokens", "256"]
    command = [sys.executable, "-m", "paceline", "serve", str(folder), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        url = re.search(r"http://\S+(?=/v1)", process.stdout.readline())
        yield url and url[0], process
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(60) == 0
        finally:
            process.kill()


def memory_mib(pid: int) -> float:
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1024


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def family(pid: int) -> list[int]:
    """The process and its children: the server and its engine."""
    return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


async def wait_until_ready(client: aiohttp.ClientSession, url: str) -> None:
    for _ in range(600):
        try:
            async with client.get(f"{url}/health") as reply:
                if reply.status == 200:
                    return
        except aiohttp.ClientConnectorError:
            pass
        await asyncio.sleep(0.1)
    raise AssertionError("the server did not become ready")


async def one_request(client: aiohttp.ClientSession, url: str, number: int) -> str:
    """One streaming request; a quarter of the clients leave at a random moment."""
    draw = random.Random(number)
    leaves_after = draw.uniform(0, 0.5) if draw.random() < 0.25 else None
    body = {
        "prompt": [draw.randrange(4, 200) for _ in range(draw.randrange(1, 100))],
        "max_tokens": draw.randrange(1, 60),
        "n": draw.choice([1, 1, 1, 2]),
        "temperature": draw.choice([0, 1]),
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }

    async def read() -> str:
        usage, finished = None, 0
        async with client.post(f"{url}/v1/completions", json=body) as reply:
            assert reply.status == 200, await reply.text()
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    chunk = json.loads(line[6:])
                    assert "error" not in chunk, chunk
                    usage = chunk.get("usage") or usage
                    finished += sum(choice["finish_reason"] is not None for choice in chunk["choices"])
                elif line == b"data: [DONE]\n":
                    assert finished == body["n"]
                    assert usage["completion_tokens"] == body["n"] * body["max_tokens"]
                    return "done"
        raise AssertionError("the stream ended without [DONE]")

    try:
        return await asyncio.wait_for(read(), leaves_after)
    except TimeoutError:
        return "left"


async def wait_until_idle(client: aiohttp.ClientSession, url: str) -> str:
    """Metrics once nothing runs and nothing waits."""
    for _ in range(100):
        async with client.get(f"{url}/metrics") as reply:
            text = await reply.text()
        if all(
            re.search(rf"^paceline_{name} 0\.0$", text, re.M)
            for name in ("running", "waiting", "kv_used_ratio", "open_requests")
        ):
            return text
        await asyncio.sleep(0.1)
    raise AssertionError(f"not idle after 10 s:\n{text}")


@pytest.mark.timeout(300)
async def test_crowd_that_leaves_early(server):
    """failure 52, failure 89: no leak, no stuck request, flat memory over 2,000 requests."""
    url, process = server
    outcomes: Counter[str] = Counter()
    connector = aiohttp.TCPConnector(limit=STREAMS, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as client:
        await wait_until_ready(client, url)
        pids = family(process.pid)
        assert len(pids) == 2, "a server and its engine"
        seats = asyncio.Semaphore(STREAMS)

        async def seated(number: int) -> None:
            async with seats:
                outcomes[await one_request(client, url, number)] += 1

        started = time.monotonic()
        await asyncio.gather(*(seated(number) for number in range(REQUESTS // 4)))
        await wait_until_idle(client, url)
        before = [(memory_mib(pid), descriptors(pid)) for pid in pids]
        await asyncio.gather(*(seated(number) for number in range(REQUESTS // 4, REQUESTS)))
        text = await wait_until_idle(client, url)
        after = [(memory_mib(pid), descriptors(pid)) for pid in pids]
        print(f"{outcomes}, {time.monotonic() - started:.0f} s, MiB and descriptors {before} -> {after}")

        assert outcomes["done"] + outcomes["left"] == REQUESTS
        assert outcomes["left"] > REQUESTS // 20
        assert re.search(r"^paceline_idle_check_failures 0\.0$", text, re.M), text
        for (memory, files), (more_memory, more_files) in zip(before, after, strict=True):
            assert more_memory - memory < GROWTH_MIB
            assert more_files <= files + 2
        assert await one_request(client, url, 7) in ("done", "left")
