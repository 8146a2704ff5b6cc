"""The JSON files of a checkpoint."""

import json
from pathlib import Path
from typing import Any

from paceline.checkpoint.error import CheckpointError


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty when there is no file. Raises CheckpointError when it is not a JSON object."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} must hold a JSON object")
    return content
