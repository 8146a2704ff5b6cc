"""Prints what the tests without torch need: every requirement in pyproject.toml but those that bring torch."""

import re
import tomllib
from pathlib import Path

NEEDS_TORCH = {"torch", "transformers"}


def requirements() -> list[str]:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {*project["dependencies"], *extras["bench"], *extras["dev"]}
    return [line for line in sorted(wanted) if re.split(r"[\s<>=~!\[;]", line)[0] not in NEEDS_TORCH]


if __name__ == "__main__":
    print("\n".join(requirements()))
