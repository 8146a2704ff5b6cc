"""Ending a process that may just have ended."""

import asyncio
import sys

import pytest
import uvloop

from paceline.ipc.kill import kill


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_twice_and_after_the_end(run) -> None:
    async def check() -> int:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE)
        kill(process)
        kill(process)
        code = await process.wait()
        kill(process)
        return code

    assert run(check()) == -9
