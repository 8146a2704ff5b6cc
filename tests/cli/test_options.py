"""Every field of the configs is an option, and its value arrives."""

import dataclasses
import sys
from types import ModuleType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.cli.options import Group, expand, field_docs, parse_size
from paceline.engine.config import EngineConfig
from paceline.server.config import ServerConfig

OTHER_STRINGS = {"host": "0.0.0.0", "root_path": "/llm"}
OTHER_STRINGS |= dict.fromkeys(("step_log", "simulate", "socket_log"), "file")
OTHER_NUMBERS = {"kv_cache_share": 0.25, "max_n": 3, "max_logprobs": 4}


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineConfig, ServerConfig]]:
    """The configs that `paceline serve` hands to the server."""
    seen: list[tuple[EngineConfig, ServerConfig]] = []
    module = ModuleType("paceline.server.serve")
    module.serve = lambda engine, server: seen.append((engine, server))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "paceline.server.serve", module)
    return seen


def knobs() -> list[tuple[type, dataclasses.Field[Any]]]:
    fields = [(config, field) for config in (EngineConfig, ServerConfig) for field in dataclasses.fields(config)]
    return [(config, field) for config, field in fields if field.name != "model"]


def other_value(config: type, field: dataclasses.Field[Any]) -> tuple[list[str], Any]:
    """Arguments that set the field to something that is not its default, and that value."""
    hint = get_type_hints(config)[field.name]
    kinds = [kind for kind in get_args(hint) if kind is not type(None)] if type(None) in get_args(hint) else [hint]
    flag, kind = "--" + field.name.replace("_", "-"), kinds[0]
    if kind is bool:
        return ["--no-" + flag[2:] if field.default else flag], not field.default
    if get_origin(kind) is tuple:
        return [flag.removesuffix("s"), "one", flag.removesuffix("s"), "two"], ("one", "two")
    if get_origin(kind) is Literal:
        value = next(choice for choice in reversed(get_args(kind)) if choice != field.default)
        return [flag, value], value
    if kind is str:
        return [flag, OTHER_STRINGS[field.name]], OTHER_STRINGS[field.name]
    if field.name.endswith("_bytes"):
        return [flag, "3MiB"], 3 * 2**20
    value = OTHER_NUMBERS.get(field.name, 7)
    return [flag, str(value)], value


@pytest.mark.parametrize(("config", "field"), knobs(), ids=lambda value: getattr(value, "name", None))
def test_every_field_has_an_option_that_reaches_the_config(
    config: type, field: dataclasses.Field[Any], served: list[tuple[EngineConfig, ServerConfig]]
) -> None:
    arguments, value = other_value(config, field)
    assert value != field.default
    result = invoke("serve", "some/model", *arguments)
    assert result.exit_code == 0, result.output
    engine, server = served[0]
    if config is EngineConfig:
        assert engine == EngineConfig(model="some/model", **{field.name: value})
        assert server == ServerConfig()
    else:
        assert engine == EngineConfig(model="some/model")
        assert server == ServerConfig(**{field.name: value})


def test_without_options_the_dataclass_defaults_apply(served: list[tuple[EngineConfig, ServerConfig]]) -> None:
    assert invoke("serve", "smollm2").exit_code == 0
    assert served == [(EngineConfig(model="smollm2"), ServerConfig())]


@pytest.mark.parametrize("config", [EngineConfig, ServerConfig])
def test_help_shows_every_option_in_full_on_a_narrow_terminal(config: type) -> None:
    shown = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}).output
    for field in dataclasses.fields(config):
        if field.name != "model":
            assert other_value(config, field)[0][0] in shown


def test_field_docs_are_read_from_the_source() -> None:
    docs = field_docs(EngineConfig)
    assert docs["block_size"] == "Tokens in a KV block. None: 16 on a CPU, 64 on a GPU."
    assert docs["load_format"] == "`dummy`: random weights from the model's config alone."
    assert set(docs) == {field.name for field in dataclasses.fields(EngineConfig)}


@dataclasses.dataclass(frozen=True)
class Shared:
    count: Annotated[int, typer.Option("--how-many", min=1)] = 3
    """How many of them."""
    names: list[str] | None = None
    """Of each."""
    hidden: int = 5
    """Of no option here."""


def test_a_group_is_one_dataclass_with_the_defaults_of_its_command() -> None:
    seen = []

    @expand
    def command(
        *, shared: Annotated[Shared, Group(Shared(count=7), "Panel", leave_out=("hidden",))], own: int = 1
    ) -> None:
        seen.append((shared, own))

    small = typer.Typer()
    small.command()(command)
    assert CliRunner().invoke(small, []).exit_code == 0
    assert CliRunner().invoke(small, ["--own", "2", "--how-many", "4", "--names", "a", "--names", "b"]).exit_code == 0
    assert seen == [(Shared(count=7), 1), (Shared(4, ["a", "b"]), 2)]
    for wrong in (["--how-many", "0"], ["--hidden", "1"]):
        assert CliRunner().invoke(small, wrong).exit_code == 2
    shown = CliRunner().invoke(small, ["--help"]).output
    assert "How many of them. [default: 7]" in shown
    assert "Panel" in shown


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1000000", 10**6),
        ("4GiB", 4 * 2**30),
        ("1.5 GB", 1_500_000_000),
        ("512M", 512 * 2**20),
        ("512mib", 2**29),
        ("2k", 2048),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "4 gigs", "-1", "1e9", "0x10", "4GiB8"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not a size"):
        parse_size(text)


def test_api_keys_come_from_options_and_a_file(tmp_path: Any, served: list[tuple[EngineConfig, ServerConfig]]) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nsecond\nthird\n")
    assert invoke("serve", "smollm2", "--api-key", "first", "--api-key-file", str(file)).exit_code == 0
    assert served[0][1].api_keys == ("first", "second", "third")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "70000"], "port: must be from 0 to 65535"),
        (["--port", "http"], "Invalid value for '--port'"),
        (["--kv-cache-bytes", "lots"], "'lots' is not a size"),
        (["--dtype", "int3"], "'int3' is not one of"),
        (["--api-key-file", "/nowhere/keys"], "/nowhere/keys"),
        (["--no-such-option"], "No such option"),
    ],
)
def test_a_bad_value_is_one_clear_message_and_exit_2(
    arguments: list[str], words: str, served: list[tuple[EngineConfig, ServerConfig]]
) -> None:
    result = CliRunner().invoke(app, ["serve", "smollm2", *arguments], env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    assert result.exit_code == 2
    assert words in result.output
    assert "Traceback" not in result.output
    assert served == []
