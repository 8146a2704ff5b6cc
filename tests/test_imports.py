"""Imports point one way, and nothing heavy is loaded before it is needed."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "paceline"

# What a part may import besides itself. `engine` and `checkpoint` lie beside the chain
# cli -> server -> llm, async_llm -> front, ipc -> core -> runner -> models -> layers -> kernels.
ARROWS = {
    "engine": set(),
    "kernels": {"engine"},
    "layers": {"engine", "kernels"},
    "checkpoint": {"engine"},
    "models": {"engine", "checkpoint", "layers", "kernels"},
    "runner": {"engine", "checkpoint", "models", "layers", "kernels"},
    "simulator": {"engine"},
    "core": {"engine", "checkpoint", "runner", "simulator"},
    "ipc": {"engine", "checkpoint", "core"},
    "front": {"engine", "checkpoint"},
    "llm": {"engine", "checkpoint", "core", "front", "ipc"},
    "async_llm": {"engine", "checkpoint", "front", "ipc"},
    "server": {"engine", "checkpoint", "ipc", "async_llm", ""},
    "lab": {"engine", "checkpoint", "llm", "simulator", ""},
    "advisor": {"engine", "lab"},
    "cli": {"engine", "checkpoint", "ipc", "async_llm", "server", "lab", "advisor", "simulator", ""},
    "": {"engine", "llm", "async_llm"},  # paceline/__init__.py
    "__main__": {"cli"},
}

# Third-party packages, where a part may not take its pick.
PACKAGES = {
    "engine": {"tokenizers"},
    "kernels": {"torch", "triton", "numpy"},
    "layers": {"torch", "triton", "numpy"},
    "models": {"torch", "numpy", "safetensors"},
    "runner": {"torch", "numpy"},
    "core": {"torch"},
    "simulator": {"numpy"},
    "": set(),
}

TORCH_FREE = ("engine", "checkpoint", "core", "ipc", "front", "llm", "async_llm", "server", "")
"""Parts that the front loads: no module of theirs imports torch when it is imported."""


def modules() -> list[tuple[str, str, Path]]:
    """(part, module, file) of every module."""
    found = []
    for file in sorted(ROOT.rglob("*.py")):
        names = list(file.relative_to(ROOT).with_suffix("").parts)
        if names[-1] == "__init__":
            names.pop()
        found.append((names[0] if names else "", ".".join(["paceline", *names]), file))
    return found


def imports(tree: ast.AST, *, at_import_time: bool = False) -> Iterator[str]:
    """Full names of what a module imports, inside functions too unless ``at_import_time``; not for type checkers."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif at_import_time and (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        ):
            continue
        else:
            yield from imports(node, at_import_time=at_import_time)


def part_of(name: str) -> str:
    """Of ``paceline.PART...``: the part; what `paceline` itself exports counts as the package's top."""
    head = name.split(".")[1] if "." in name else ""
    return head if head in ARROWS else ""


@pytest.mark.parametrize(("part", "module", "file"), modules())
def test_arrows(part: str, module: str, file: Path) -> None:
    assert part in ARROWS, f"say in ARROWS what {part} may import"
    for name in imports(ast.parse(file.read_text())):
        package = name.split(".")[0]
        if package == "paceline":
            target = part_of(name)
            assert target == part or target in ARROWS[part], f"{module} must not import {name}"
        elif package not in sys.stdlib_module_names and part in PACKAGES:
            assert package in PACKAGES[part], f"{module} must not import {package}"


@pytest.mark.parametrize(("module", "file"), [found[1:] for found in modules() if found[0] in TORCH_FREE])
def test_no_torch_when_imported(module: str, file: Path) -> None:
    for name in imports(ast.parse(file.read_text()), at_import_time=True):
        assert name.split(".")[0] not in {"torch", "transformers", "triton"}, f"{module} imports {name}"


def test_tokenizers_only_in_the_text_half_of_the_engine() -> None:
    users = {
        file.stem
        for part, _, file in modules()
        if part == "engine" and any(name.startswith("tokenizers") for name in imports(ast.parse(file.read_text())))
    }
    assert users <= {"output", "detokenizer", "stop"}


@pytest.mark.parametrize(
    ("code", "banned"),
    [
        ("import paceline", {"torch", "zmq", "msgspec", "tokenizers", "rich"}),
        ("from paceline import SamplingParams", {"torch", "zmq", "msgspec", "tokenizers", "rich"}),
        ("from paceline import LLM, AsyncLLM", {"torch", "transformers"}),
        ("import paceline.ipc.process", {"torch", "transformers"}),
        ("import paceline.engine.scheduler", {"torch", "zmq", "msgspec", "tokenizers"}),
    ],
)
def test_what_an_import_loads(code: str, banned: set[str]) -> None:
    script = f"import sys; {code}; print(*sys.modules)"
    path = {"PYTHONPATH": str(ROOT.parent)}
    run = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, env=path, check=False)
    assert run.returncode == 0, run.stderr
    assert not banned & set(run.stdout.split())


def test_exports() -> None:
    import paceline

    assert set(paceline.__all__) <= set(dir(paceline))
    for name in paceline.__all__:
        assert getattr(paceline, name).__name__ == name
    with pytest.raises(AttributeError):
        paceline.nothing  # noqa: B018
