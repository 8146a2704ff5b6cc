"""`docs/server.md` says everything."""

import dataclasses
from pathlib import Path

from paceline.server.config import ServerConfig
from paceline.server.fields import ChatFields, CompletionFields, DetokenizeFields, TokenizeFields
from paceline.server.metrics import Metrics

DOCS = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")


def test_every_parameter_and_field() -> None:
    names = [field.name for field in dataclasses.fields(ServerConfig)]
    for model in (CompletionFields, ChatFields, TokenizeFields, DetokenizeFields):
        names += model.model_fields
    assert [name for name in names if f"`{name}`" not in DOCS] == []


def shown_default(name: str, default: object) -> str:
    """As the table writes it."""
    if name == "max_body_bytes":
        return f"{default // 2**20} MiB"  # type: ignore[operator]
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, (int, float)):
        return f"{default:g}" if isinstance(default, float) else str(default)
    words = {"root_path": "", "api_keys": "none", "served_model_names": "the model as given"}
    words["api_processes"] = "one for every four cores, at most four"
    if name in words:
        assert not default
        return words[name]
    return f"`{default}`"


def test_every_default() -> None:
    rows = (line.split("|") for line in DOCS.splitlines() if line.startswith("| `"))
    shown = {row[1].split("`")[1]: row[2].strip() for row in rows if len(row) == 5}
    expected = {field.name: shown_default(field.name, field.default) for field in dataclasses.fields(ServerConfig)}
    assert {name: shown.get(name) for name in expected} == expected


def test_every_metric() -> None:
    names = [
        family.name.removeprefix("paceline_") + ("_total" if family.type == "counter" else "")
        for family in Metrics().registry.collect()
    ]
    assert len(names) > 15
    assert [name for name in names if f"`{name}" not in DOCS] == []
