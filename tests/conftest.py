"""Without torch, the tests that need it are left out and counted; with it, none are."""

import ast
import importlib.util
import os
import signal
from functools import cache
from pathlib import Path

if importlib.util.find_spec("torch"):
    import torch

    if not torch.cuda.is_available():
        # Triton reads it when it is first imported, which transformers does in the tests of other folders.
        os.environ["TRITON_INTERPRET"] = "1"

# A shell that starts this in the background has SIGINT ignored, and every process that a test starts would inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent
ROOTS = (TESTS, TESTS.parent / "src")
NEED_TORCH = {"torch", "transformers", "safetensors.torch"}


@cache
def imports(file: Path) -> set[str]:
    """Modules that a file imports when it is imported itself."""
    modules = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
    return modules


def needs_torch(test: Path) -> bool:
    """Whether importing a test imports torch, directly or through other files of the repository."""
    seen, ahead = set(), [test]
    while ahead:
        file = ahead.pop()
        seen.add(file)
        if any(module in NEED_TORCH or module.startswith("torch.") for module in imports(file)):
            return True
        ours = {root / (module.replace(".", "/") + ".py") for module in imports(file) for root in (*ROOTS, test.parent)}
        ahead += [path for path in ours - seen if path.is_file()]
    return False


collect_ignore = [
    str(path)
    for path in sorted(TESTS.rglob("test_*.py"))
    if importlib.util.find_spec("torch") is None and needs_torch(path)
]


def pytest_report_header() -> list[str]:
    return [f"torch is not installed: {len(collect_ignore)} files of tests are left out"] if collect_ignore else []
