"""Imports point one way (docs/architecture.md), and what must load without torch does."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "paceline"

MAY_IMPORT = {
    "engine": set(),
    "checkpoint": {"engine"},
    "kernels": {"engine"},
    "layers": {"kernels", "engine"},
    "models": {"layers", "kernels", "checkpoint", "engine"},
    "runner": {"models", "layers", "kernels", "checkpoint", "engine"},
    "core": {"runner", "checkpoint", "engine"},
    "ipc": {"core", "checkpoint", "engine"},
    "llm": {"ipc", "core", "checkpoint", "engine"},
    "server": {"llm", "ipc", "checkpoint", "engine"},
    "cli": {"server", "llm", "ipc", "checkpoint", "engine"},
    "__init__": {"llm", "engine"},
    "__main__": {"cli"},
}
ENGINE_MAY_LOAD = {"tokenizers"}


def imported(file: Path) -> Iterator[str]:
    """Full names of the modules that a file imports anywhere, also inside functions."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            assert node.module is not None
            yield node.module


def part(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("name", sorted({part(file) for file in SOURCE.rglob("*.py")}))
def test_imports_point_one_way(name: str) -> None:
    assert name in MAY_IMPORT, "a new part: give it a place in the map"
    for file in SOURCE.rglob("*.py"):
        if part(file) != name:
            continue
        for module in imported(file):
            if module.split(".")[0] == "paceline":
                target = [*module.split("."), "__init__"][1]
                assert target == name or target in MAY_IMPORT[name], f"{file} imports {module}"


def test_the_engine_knows_nothing_but_the_standard_library() -> None:
    for file in (SOURCE / "engine").rglob("*.py"):
        for module in imported(file):
            top = module.split(".")[0]
            assert top in sys.stdlib_module_names or top == "paceline" or top in ENGINE_MAY_LOAD, f"{file}: {module}"


@pytest.mark.parametrize("module", ["paceline", "paceline.llm", "paceline.ipc.client", "paceline.server.serve"])
def test_loads_no_torch(module: str) -> None:
    script = f"import sys, {module}; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"


def test_checkpoint_loads_no_torch_before_a_tensor_is_read() -> None:
    names = ["paceline.checkpoint." + file.stem for file in (SOURCE / "checkpoint").glob("*.py")]
    script = f"import sys, {', '.join(sorted(names))}; print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert shown.stdout == "False\n"
