"""`serve` in a process of its own, for tests."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from engine_factories import write_folder

TESTS = Path(__file__).parents[1]
CODE = """
import sys
from paceline.engine.config import EngineConfig
from paceline.server.config import ServerConfig
from paceline.server.serve import serve
serve(EngineConfig(model=sys.argv[1]), ServerConfig(**eval(sys.argv[2])), core=sys.argv[3])
"""
LONG = {"prompt": "hello", "max_tokens": 900, "ignore_eos": True, "stream": True}
"""9 seconds."""


@contextmanager
def process(folder: Path, core: str = "steady", **config: Any) -> Iterator[subprocess.Popen[str]]:
    command = [
        sys.executable,
        "-c",
        CODE,
        str(write_folder(folder)),
        repr({"port": 0, "api_processes": 1, **config}),
        f"served_core:{core}",
    ]
    path = os.pathsep.join([str(TESTS), str(TESTS / "server"), str(TESTS.parent / "src")])
    served = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": path},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield served
    finally:
        children = psutil.Process(served.pid).children(recursive=True) if served.poll() is None else []
        for left in [served, *children]:
            left.kill()
        served.communicate()


def ready(served: subprocess.Popen[str]) -> str:
    """The URL from the line that says that the server is ready."""
    assert served.stdout is not None
    line = served.stdout.readline()
    match = re.search(r"http://\S+(?=/v1)", line)
    assert match, line + (served.stderr.read() if served.stderr else "")
    return match[0]


def children(served: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(served.pid).children(recursive=True)


def ends(served: subprocess.Popen[str], within: float) -> str:
    """Waits for the exit, which must be with status 0; returns standard error."""
    _, errors = served.communicate(timeout=within)
    assert served.returncode == 0, errors
    assert "Traceback" not in errors
    return errors


async def until_draining(client: httpx.AsyncClient) -> None:
    """Until the server has seen a signal."""
    async with asyncio.timeout(10):
        while (await client.get("/health")).status_code != 503:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def events(client: httpx.AsyncClient, body: dict[str, Any], opened: asyncio.Event | None = None) -> list[str]:
    found = []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line:
                found.append(line.removeprefix("data: "))
                if opened is not None:
                    opened.set()
    return found
