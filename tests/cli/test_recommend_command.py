"""`paceline recommend` as a command."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lab.measured import invalid, rate_sweep, results
from paceline.cli.app import app
from paceline.lab.results import to_json

RATES = [1.0, 3.0, 5.0, 6.0, 7.0, 8.0]
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "prices.toml")


@pytest.fixture
def measured(tmp_path: Path) -> list[str]:
    """Two files of one engine each."""
    paths = []
    for engine, limit in (("paceline", 7.0), ("vllm", 5.0)):
        path = tmp_path / f"{engine}.json"
        path.write_text(to_json(results(rate_sweep(engine, RATES, limit))))
        paths.append(str(path))
    return paths


def test_tables(measured: list[str]) -> None:
    done = CliRunner().invoke(app, ["recommend", *measured, "--price", EXAMPLE, "--gpu", "H200", "--load", "40"])
    assert done.exit_code == 0, done.output
    assert (
        "Choice: paceline keeps ttft_p99 < 1s, tpot_p99 < 20ms at 40 requests/s on 8 replicas of 1 x H200"
        in done.output
    )
    assert "vllm: It costs 1.38x what paceline costs and needs 11 GPUs instead of 8" in done.output
    assert "Replicas run at 80% of their goodput, in whole numbers." in " ".join(done.output.split())


def test_json(measured: list[str]) -> None:
    arguments = ["--price", EXAMPLE, "--gpu", "vllm=2xL40S", "--gpu", "paceline=H200", "--slo", "ttft_p99<1s", "--json"]
    done = CliRunner().invoke(app, ["recommend", *measured, *arguments])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["constraints"] == ["ttft_p99<1s"]
    assert {item["engine"]: item["hardware"] for item in found["candidates"]} == {
        "vllm": {"gpu": "L40S", "count": 2},
        "paceline": {"gpu": "H200", "count": 1},
    }
    assert found["candidates"][0]["lost"] == ""
    assert found["candidates"][1]["lost"]


def test_no_choice_is_an_exit_code(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(to_json(results([invalid(point, "rate: low") for point in rate_sweep("vllm", RATES, 5)])))
    done = CliRunner().invoke(app, ["recommend", str(path), "--price", EXAMPLE, "--gpu", "H200"])
    assert done.exit_code == 1
    assert "No choice" in done.output
    assert "None of its points is valid (rate: low)." in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--price", "none.toml"], "none.toml: No such file"),
        (["--price", EXAMPLE], "paceline=1xH200"),
        (["--price", EXAMPLE, "--gpu", "0xH200"], "names no GPUs"),
        (["--price", EXAMPLE, "--slo", "fast"], "no preset named 'fast'"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(measured: list[str], arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["recommend", *measured, *arguments])
    assert done.exit_code == 2
    assert message in done.output
    assert "Traceback" not in done.output
