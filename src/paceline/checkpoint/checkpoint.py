"""One view of a model on disk, whatever its format."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paceline.checkpoint.chat_template import ChatTemplate
from paceline.checkpoint.error import CheckpointError
from paceline.checkpoint.folder import FolderCheckpoint
from paceline.checkpoint.generation import GenerationDefaults
from paceline.checkpoint.gguf import GGUFCheckpoint
from paceline.checkpoint.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch


class Checkpoint(Protocol):
    """A model on disk, in Hugging Face's vocabulary."""

    @property
    def name(self) -> str:
        """Short name for people: the folder's or the file's."""

    @property
    def config(self) -> dict[str, Any]:
        """As in ``config.json``."""

    @property
    def dtype(self) -> str | None:
        """``"float32"``, ``"bfloat16"`` or ``"float16"``; None when nothing is stated, or not one. In
        an FP8 checkpoint it is that of the other weights."""

    @property
    def generation(self) -> GenerationDefaults:
        """Where to stop and how to sample when a request says nothing."""

    def tensor_names(self) -> Sequence[str]:
        """Names of all weights. Raises CheckpointError when files or tensors are missing or broken, and lists them."""

    def tensor(self, name: str) -> "torch.Tensor":
        """Reads one weight, [out, in] for a matrix, on the CPU. Quantised GGUF types come as float32."""

    def tokenizer(self) -> Tokenizer: ...

    def chat_template(self) -> ChatTemplate | None:
        """None when the checkpoint has none."""


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a Hugging Face folder or a GGUF file (see ``source.locate``). Reads the configuration, no weights.

    Raises:
        CheckpointError: missing, broken or not supported.
    """
    if path.is_dir():
        return FolderCheckpoint(path)
    if path.suffix == ".gguf" and path.is_file():
        return GGUFCheckpoint(path)
    raise CheckpointError(f"{path} is neither a model folder nor a .gguf file")
