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


def test_every_metric() -> None:
    names = [
        family.name.removeprefix("paceline_") + ("_total" if family.type == "counter" else "")
        for family in Metrics().registry.collect()
    ]
    assert len(names) > 15
    assert [name for name in names if f"`{name}" not in DOCS] == []
