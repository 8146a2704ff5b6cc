"""The command as a program."""

import subprocess
import sys
import time
from importlib.metadata import version

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import paceline
from paceline.checkpoint.error import CheckpointError
from paceline.cli.app import app
from paceline.cli.errors import failures
from paceline.engine.invalid import InvalidRequest
from paceline.ipc.errors import EngineDead


def test_version() -> None:
    assert paceline.__version__ == version("paceline")
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"paceline {version('paceline')}\n"


def test_module_and_help() -> None:
    shown = subprocess.run([sys.executable, "-m", "paceline", "--help"], capture_output=True, text=True, check=True)
    assert "serve" in shown.stdout
    assert "chat" in shown.stdout


def test_no_option_has_its_own_name_for_its_value() -> None:
    """Typer 0.27 takes such a metavar for the name: --command became --COMMAND."""
    waiting, options = [get_command(app)], []
    while waiting:
        command = waiting.pop()
        waiting += getattr(command, "commands", {}).values()
        options += [parameter for parameter in command.params if parameter.param_type_name == "option"]
    assert "command" in {option.name for option in options}
    assert [option.name for option in options if option.metavar == (option.name or "").upper()] == []


def test_help_loads_nothing_heavy() -> None:
    script = """
import sys
from typer.testing import CliRunner
from paceline.cli.app import app
for verb in ("serve", "chat"):
    assert CliRunner().invoke(app, [verb, "--help"]).exit_code == 0
heavy = {"torch", "numpy", "fastapi", "uvicorn", "tokenizers", "transformers", "zmq", "huggingface_hub", "jinja2"}
print(sorted(heavy & set(sys.modules)))
"""
    start = time.perf_counter()
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"
    assert time.perf_counter() - start < 10  # 0.4 s alone on a machine; torch alone would take several times that


@pytest.mark.parametrize(
    "error",
    [CheckpointError("no model"), InvalidRequest("prompt", "too long"), EngineDead("it ended"), OSError("no room")],
)
def test_failures_are_one_line_and_exit_1(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    from typer import Exit

    with pytest.raises(Exit) as raised, failures():
        raise error
    assert raised.value.exit_code == 1
    assert capsys.readouterr().err == f"Error: {error}\n"


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(KeyError), failures():
        raise KeyError("a bug")
