"""The documents say what is true, and nothing else than the project is in the repository."""

import ast
import dataclasses
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from paceline.cli.app import app
from paceline.engine.config import EngineConfig
from paceline.engine.sampling_params import SamplingParams
from paceline.server.config import ServerConfig

ROOT = Path(__file__).parents[1]
SUFFIXES = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".json", ".cfg", ".html", ".sh"}
FOLDERS = ("src", "tests", "docs", "examples", "benchmarks", ".ci", ".github")

# What only one machine would know.
FOREIGN = [
    r"/root/",
    r"/home/\w",
    r"/opt/",
    r"/tmp/\w",
    r"\b(pypi\.org|pythonhosted|npmjs)",
]


def files() -> list[Path]:
    found = [path for path in ROOT.iterdir() if path.is_file() and path.suffix in {*SUFFIXES, ""}]
    for folder in FOLDERS:
        found += [path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix in {*SUFFIXES, ""}]
    return sorted(found)


def documents() -> list[Path]:
    return [path for path in files() if path.suffix == ".md"]


def short(path: object) -> str | None:
    return str(path.relative_to(ROOT)) if isinstance(path, Path) else None


def code(document: Path) -> Iterator[str]:
    """Lines of code in a document: of blocks, with continued lines joined, and in the text."""
    text = document.read_text()
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S):
        yield from re.sub(r"\\\n", " ", block).splitlines()
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


def test_the_repository_speaks_of_the_project_alone() -> None:
    found = [
        f"{short(path)}:{number}: {line.strip()[:120]}"
        for path in files()
        if path != Path(__file__)
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if any(re.search(pattern, line, re.I) for pattern in FOREIGN)
    ]
    assert found == []


@pytest.mark.parametrize("document", documents(), ids=short)
def test_links_lead_somewhere(document: Path) -> None:
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://|mailto:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (document.parent / name).resolve() if name else document
        assert path.exists(), f"{short(document)} links to {target}"
        assert path.is_relative_to(ROOT), f"{short(document)} links out of the repository: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", path.read_text(), re.M)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{short(document)} links to {target}"


def test_documents_that_code_names_exist() -> None:
    names = {path.name for path in documents()}
    for path in files():
        if path.suffix in {".py", ".toml", ".yaml"} and path != Path(__file__):
            for name in re.findall(r"[\w.-]+\.md\b", path.read_text()):
                assert name in names, f"{short(path)} names {name}"


def test_documented_make_targets_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {
        target for document in documents() for line in code(document) for target in re.findall(r"\bmake ([\w-]+)", line)
    }
    assert {"demo", "test", "venv"} <= named
    assert named <= targets


def verbs(command: Any, name: str = "") -> Iterator[tuple[str, set[str]]]:
    """(verb, its options), of groups ``group verb``."""
    for part, verb in command.commands.items():
        if hasattr(verb, "commands"):
            yield from verbs(verb, f"{name}{part} ")
        else:
            yield name + part, {option for p in verb.params for option in p.opts}


def test_documented_commands_and_options_exist() -> None:
    known = dict(verbs(typer.main.get_command(app)))
    groups = {verb.split()[0] for verb in known if " " in verb}
    seen = set()
    for document in documents():
        for line in code(document):
            for verb, rest in re.findall(r"(?:^|[|] |source .*&& )paceline (\w+)(.*)", line):
                if verb in groups:
                    found = re.match(r" ([a-z]\w*)(.*)", rest)
                    if found is None:  # the group itself
                        continue
                    verb, rest = f"{verb} {found[1]}", found[2]
                assert verb in known, f"{short(document)}: paceline {verb}"
                seen.add(verb)
                for option in re.findall(r"(?<!\S)--?[a-z][\w-]*", rest):
                    assert option in {*known[verb], "--help", "-h"}, f"{short(document)}: {line}"
    assert seen == set(known)


@pytest.mark.parametrize("document", documents(), ids=short)
def test_python_in_documents_is_python_and_imports_what_exists(document: Path) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", document.read_text(), re.M | re.S):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paceline"):
                module = __import__(str(node.module), fromlist=["*"])
                for alias in node.names:
                    assert alias.name in dir(module), f"{short(document)}: {node.module}.{alias.name}"


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (EngineConfig, {"config", "engine_config"}),
        (ServerConfig, {"config", "server_config"}),
        (SamplingParams, {"params"}),
    ],
)
def test_every_field_is_read(config: type, names: set[str]) -> None:
    """No knob is accepted and ignored: code reads it from a variable or attribute of one of these names, directly or
    through a property of the class."""
    home = Path(str(sys.modules[config.__module__].__file__))
    read = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[-1].lstrip("_") in names:
                read.add(node.attr)
    for node in ast.walk(ast.parse(home.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name in read:
            read |= {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}
    assert {field.name for field in dataclasses.fields(config)} - read == set()


@pytest.mark.parametrize("config", [EngineConfig, SamplingParams])
def test_the_engines_manual_has_every_field_with_its_default(config: type) -> None:
    manual = (ROOT / "docs" / "engine.md").read_text()
    rows = {name: default.strip("` ") for name, default in re.findall(r"^\| `(\w+)` \|([^|]*)\|", manual, re.M)}
    for field in dataclasses.fields(config):
        assert field.name in rows
        default = field.default
        if isinstance(default, int | float) and not isinstance(default, bool):
            assert float(rows[field.name]) == default, field.name
        elif isinstance(default, bool):
            assert rows[field.name] in {True: ("on", "yes"), False: ("off", "no")}[default], field.name
        elif isinstance(default, str):
            assert rows[field.name] == default, field.name


def requirements() -> dict[str, set[str]]:
    """Distribution names by group; the group of the core is empty."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    return {group: {normal(line) for line in lines} for group, lines in groups.items()}


def normal(requirement: str) -> str:
    return re.split(r"[\s<>=~!\[;]", requirement)[0].lower().replace("_", "-")


def test_what_the_package_imports_is_what_it_requires() -> None:
    distributions = {"zmq": "pyzmq", "starlette": "fastapi", "pynvml": "nvidia-ml-py"}
    indirect = {"httptools"}  # uvicorn finds it by name
    imported = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.split(".")[0])
    third = {distributions.get(name, name.replace("_", "-")) for name in imported - sys.stdlib_module_names}
    extras = {"triton": "gpu", "plotly": "bench", "nvidia-ml-py": "bench"}
    assert third - {"paceline", *extras} | indirect == requirements()[""]
    assert all(name in requirements()[group] for name, group in extras.items())
    assert requirements()["gpu"] == {"triton"}


def test_constraints_pin_every_requirement() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    pinned = {normal(line) for line in lines}
    groups = requirements()
    assert (groups[""] | groups["bench"] | groups["dev"]) - pinned == set()


def test_ci_runs_the_command_of_the_readme() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text()
    assert "`make test`" in (ROOT / "README.md").read_text()
