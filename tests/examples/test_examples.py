"""The examples, run as programs with a tiny random model."""

import re
import subprocess
import sys

import pytest

from load_example import FOLDER, load
from tiny_models import make_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "llama"
    make_tiny(folder, "llama")
    return str(folder)


def run(name: str, argument: str) -> str:
    command = [sys.executable, str(FOLDER / name), argument]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_demo(model: str) -> None:
    shown = run("demo.py", model)
    assert "> Why does the sky look blue?" in shown
    assert re.search(r"TTFT .* ms .* 32 of 32", shown)
    assert re.search(r"32 completed, 0 failed; \d+ output tokens in [\d.]+ s: throughput [\d.,]+ tokens/s", shown)
    assert "ended with status 0" in shown


def test_offline(model: str) -> None:
    shown = run("offline.py", model)
    assert len(re.findall(r"^'.*' -> '.*' \((?:length|stop)\)$", shown, re.M)) == 3
    assert len(re.findall(r"^candidate [01]: ", shown, re.M)) == 2


def test_openai_client(model: str) -> None:
    with load("demo").server(model) as url:
        assert re.search(r"\n\d+ tokens\n$", run("openai_client.py", url))
