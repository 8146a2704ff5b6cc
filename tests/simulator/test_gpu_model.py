"""Files of GPU models."""

import json
from pathlib import Path

import pytest
from gpu_models import gpu_model

from paceline.simulator.gpu_model import SHIPPED, GpuModel


def test_saved_and_loaded(tmp_path: Path) -> None:
    model = gpu_model(fixed_s=0.001, kv_token_s=1e-9, request_s=0.002)
    model.save(tmp_path / "model.json")
    assert GpuModel.load(str(tmp_path / "model.json")) == model


@pytest.mark.parametrize("file", sorted(SHIPPED.glob("*.json")), ids=lambda file: file.stem)
def test_shipped_models_say_where_they_come_from(file: Path) -> None:
    model = GpuModel.load(file.stem)
    assert model.name == file.stem
    assert model.machine
    assert model.fitted
    assert model.error or "not fitted" in model.fitted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "schema_version must be 1"),
        ({"step_time": None}, "step_time is missing"),
        ({"step_time": {"fixed_s": -1}}, "fixed_s: must be"),
        ({"step_time": {"fixed": 1}}, "fixed"),
        ({"engine": {"num_blocks": 3, "max_model_len": 1000}}, r"engine\.num_blocks: 3 blocks"),
        ({"engine": {"num_blocks": 3.5, "max_model_len": 1}}, r"engine\.num_blocks: must be"),
        ({"engine": {"num_blocks": 3}}, "max_model_len"),
        ({"request_s": -1}, "request_s: must be"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "model.json"
    gpu_model().save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=rf"model\.json is no GPU model: .*{message}"):
        GpuModel.load(str(path))


def test_no_such_model() -> None:
    with pytest.raises(ValueError, match=r"no GPU model 'h300': give a JSON file, or one of .*example"):
        GpuModel.load("h300")
