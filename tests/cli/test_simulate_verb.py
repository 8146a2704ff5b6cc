"""`paceline simulate` on a small made-up trace."""

import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.app import app


def trace(folder: Path, count: int = 60) -> str:
    rng, second = random.Random(1), 0.0
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for _ in range(count):
        lines.append(f"2023-11-16 18:00:{second:010.7f},{rng.randint(10, 900)},{rng.randint(2, 40)}")
        second += rng.expovariate(5)
    path = folder / "trace.csv"
    path.write_text("\r\n".join(lines) + "\r\n")
    return str(path)


def run(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["simulate", *arguments])
    assert result.exit_code == status, result.output
    return result.output


def test_report_and_document(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    text = run(trace(tmp_path), "--gpu-model", "example", "--slo", "ttft_p99<1s, tpot_mean<1ms", "--json", str(out))
    assert "60 of 60 requests served by 1 replica of example" in text
    assert "ttft_p99<1s: kept" in text
    assert "tpot_mean<1ms: not kept" in text
    assert "attainment 0.0%" in text
    document = json.loads(out.read_text())
    [point] = document["points"]
    assert point["requests"] == {"sent": 60, "ok": 60, "failed": 0}
    assert 0.006 < point["ttft_s"]["p50"] < 0.2
    # A step without a prompt takes at least fixed_s + weights_s.
    assert point["tpot_s"]["mean"] >= 0.006
    assert f"{point['ttft_s']['p99'] * 1e3:,.1f}" in text


def test_more_replicas_and_smaller_sizes(tmp_path: Path) -> None:
    def ttft(*options: str) -> float:
        run(trace(tmp_path), "--gpu-model", "example", "--json", str(tmp_path / "out.json"), "--scale", "20", *options)
        return json.loads((tmp_path / "out.json").read_text())["points"][0]["ttft_s"]["p90"]

    one = ttft("--max-num-seqs", "4")
    assert ttft("--max-num-seqs", "4", "--replicas", "3") < 0.7 * one
    assert ttft() < 0.7 * one
    assert ttft("--max-num-seqs", "4", "--requests", "5") < 0.7 * one


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--gpu-model", "h300"), "no GPU model 'h300'"),
        (("--gpu-model", "example", "--slo", "ttft<1s"), "is no constraint"),
        (("--gpu-model", "example", "--scale", "0"), "scale"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    assert message in run(trace(tmp_path), *options, status=2)


def test_serve_wants_a_model_unless_it_simulates() -> None:
    result = CliRunner().invoke(app, ["serve"])
    assert result.exit_code == 2
    assert "MODEL is missing" in result.output
