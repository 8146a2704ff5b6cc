from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from running_server import Server, Start, running

from fake_llm import FakeLLM
from paceline.server.config import ServerConfig


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts servers: ``await start(FakeLLM options, config=ServerConfig(...))``."""
    async with AsyncExitStack() as stack:

        async def begin(config: ServerConfig | None = None, **llm: Any) -> Server:
            return await stack.enter_async_context(running(FakeLLM(**llm), config or ServerConfig()))

        yield begin


@pytest.fixture
async def server(start: Start) -> Server:
    return await start()
