"""The results document: what is written is read again, and others can rely on its form."""

import csv
import io
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from made_replies import log_of, open_loop, steady

from paceline.lab.experiment import read_experiment
from paceline.lab.gpu_watch import Gpus
from paceline.lab.measure import measure
from paceline.lab.point import SCHEMA_VERSION, Counts, Point, Statistics
from paceline.lab.results import (
    InvalidResults,
    MeasuredTarget,
    Results,
    from_json,
    read_results,
    to_csv,
    to_json,
)
from paceline.lab.run import make_stage
from paceline.lab.search import Probe, SearchResult, find_rate
from paceline.lab.slo import PRESETS, parse_constraints
from paceline.lab.target import Target

DOCUMENT = Path(__file__).parents[2] / "docs" / "lab.md"
TARGET = Target("engine", "http://127.0.0.1:8000", "model", ("serve", "model"), {"SECRET": "one"}, api_key="two")


def results() -> Results:
    slo = parse_constraints("ttft_p99 < 1s, itl_p99 < 1s")
    point = measure(open_loop(300, 50.0), slo)
    failed = measure(log_of([steady(0, 0.0, error="HTTP 500, twice")]), slo)
    search = find_rate(lambda rate: replace(point, name=f"rate={rate:g}", attainment=float(rate < 5)), 1, 8)
    return Results(
        experiment="chat",
        started_at="2026-11-30T12:00:00+00:00",
        targets=[MeasuredTarget.of(TARGET, {"version": "1.0"})],
        machine={"cpu": "example", "cores": 2},
        commands=["paceline bench rate"],
        constraints=[item.text for item in slo],
        points=[point, failed],
        searches=[search],
    )


def test_round_trip() -> None:
    written = results()
    assert from_json(to_json(written)) == written
    assert isinstance(from_json(to_json(written)).points[0].attainment_interval, tuple)


def test_form() -> None:
    document: dict[str, Any] = json.loads(to_json(results()))
    assert document["schema_version"] == SCHEMA_VERSION == 1
    point, failed = document["points"]
    assert set(point["requests"]) == {"sent", "ok", "failed"}
    for metric in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
        assert set(point[metric]) == {"mean", "p50", "p90", "p95", "p99", "max"}
        assert set(failed[metric].values()) == {None}  # not measured is null, never 0
    for name in ("offered_rate", "batch", "valid", "reasons", "output_tokens_per_s", "goodput_rps", "attainment"):
        assert name in point
    assert failed["errors"] == {"HTTP 500, twice": 1}
    assert failed["valid"] is False


def test_no_secret_is_told() -> None:
    assert "SECRET" not in to_json(results())
    assert "two" not in to_json(replace(results(), points=[]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no results document"),
        ("[]", "no results document"),
        ('{"points": []}', "schema_version"),
        ('{"schema_version": 99}', "schema version 99; this paceline reads 1"),
        ('{"schema_version": 1, "experiment": 3}', "experiment"),
    ],
)
def test_other_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_text(text)
    with pytest.raises(InvalidResults, match=message) as error:
        read_results(file)
    assert str(file) in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidResults, match="No such file"):
        read_results(tmp_path / "none.json")


def test_fields_of_later_versions_are_ignored() -> None:
    document = json.loads(to_json(results()))
    document["new"] = document["points"][0]["new"] = 1
    assert from_json(json.dumps(document)) == results()


def test_csv_has_a_row_a_point() -> None:
    first, second = csv.DictReader(io.StringIO(to_csv(results())))
    point = results().points[0]
    assert float(first["ttft_s_p99"]) == point.ttft_s.p99
    assert (first["name"], first["valid"], first["sent"], first["failed"]) == ("stage", "True", "300", "0")
    assert float(first["attainment_low"]) == pytest.approx(0.98735, abs=1e-4)
    assert (second["ttft_s_p99"], second["goodput_rps"], second["valid"]) == ("", "", "False")
    assert second["reasons"].startswith("empty: ")


def test_the_most_gpus_seen_at_work_are_those_of_the_target() -> None:
    found = results()
    for count in (1, 4, 2, 0):
        seen = [Gpus("NVIDIA H200", count, "570.1")] if count else []
        found = found.with_gpus("engine", seen).with_gpus("another", seen)
    assert [target.gpus for target in found.targets] == [[Gpus("NVIDIA H200", 4, "570.1")]]
    assert json.loads(to_json(found))["targets"][0]["gpus"] == [{"name": "NVIDIA H200", "count": 4, "driver": "570.1"}]
    assert from_json(to_json(found)) == found
    older = json.loads(to_json(found))
    del older["targets"][0]["gpus"]
    assert from_json(json.dumps(older)).targets[0].gpus == []


@pytest.mark.parametrize("kind", [Results, MeasuredTarget, Gpus, Point, Counts, Statistics, SearchResult, Probe])
def test_every_field_is_described(kind: Any) -> None:
    text = DOCUMENT.read_text()
    assert [item.name for item in fields(kind) if f"`{item.name}`" not in text] == []


def test_the_experiment_in_the_document_is_read(tmp_path: Path) -> None:
    file = tmp_path / "chat.toml"
    file.write_text(DOCUMENT.read_text().split("```toml\n")[1].split("```")[0])
    experiment = read_experiment(file)
    assert parse_constraints(experiment.slo)
    assert len(make_stage(experiment.stages[0], 0).requests) == 512
    assert experiment.search is not None


def test_every_preset_is_described() -> None:
    text = DOCUMENT.read_text()
    assert [name for name, slo in PRESETS.items() if f"| `{name}` | `{slo}` |" not in text] == []
