"""A Hugging Face model folder: config.json, safetensors, tokenizer.json."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.checkpoint.chat_template import ChatTemplate, folder_template
from paceline.checkpoint.error import CheckpointError
from paceline.checkpoint.generation import GenerationDefaults, generation_defaults
from paceline.checkpoint.json_file import read_json
from paceline.checkpoint.quantization import is_fp8
from paceline.checkpoint.tokenizer import Tokenizer, folder_tokenizer, special_tokens

if TYPE_CHECKING:
    import torch

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES = ("float32", "bfloat16", "float16")


class FolderCheckpoint:
    """Implements ``Checkpoint``. Weights are found through the index, if there is one, and read one by one."""

    def __init__(self, folder: Path) -> None:
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"{folder} has no config.json; is it the folder of a model?")
        self.folder = folder
        self.name = folder.resolve().name
        self.config: dict[str, Any] = read_json(folder / "config.json")
        is_fp8(self.config)  # raises where another quantisation is stated

    @property
    def dtype(self) -> str | None:
        stated = self.config.get("dtype") or self.config.get("torch_dtype")
        if not isinstance(stated, str):
            return None
        dtype = stated.removeprefix("torch.")
        return dtype if dtype in _DTYPES else None

    @cached_property
    def generation(self) -> GenerationDefaults:
        stated = read_json(self.folder / "generation_config.json")
        has_tokenizer = (self.folder / "tokenizer.json").is_file()
        return generation_defaults(stated, self.config, self._tokenizer.eos_id if has_tokenizer else None)

    def tensor_names(self) -> Sequence[str]:
        return tuple(self._files)

    def tensor(self, name: str) -> "torch.Tensor":
        if name not in self._files:
            raise CheckpointError(f"{self.folder} has no tensor {name}")
        return self._shards[self._files[name]].get_tensor(name)

    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def chat_template(self) -> ChatTemplate | None:
        return self._chat_template

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return folder_tokenizer(self.folder)

    @cached_property
    def _chat_template(self) -> ChatTemplate | None:
        return folder_template(self.folder, special_tokens(self.folder))

    @cached_property
    def _files(self) -> dict[str, str]:
        """Tensor name -> file name. What is in other files, or in a shard but not in the index, is not loaded."""
        shards = self._shards
        if (self.folder / INDEX).is_file():
            return dict(self._weight_map)
        return dict.fromkeys(shards[WEIGHTS].keys(), WEIGHTS)

    @cached_property
    def _weight_map(self) -> Mapping[str, str]:
        weight_map = read_json(self.folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{self.folder / INDEX} assigns no tensors: weight_map is missing or empty")
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise CheckpointError(f"{self.folder / INDEX}: {name} must name a file of this folder, not {file!r}")
        return weight_map

    @cached_property
    def _shards(self) -> dict[str, Any]:
        """File name -> open safetensors file (memory-mapped). All are opened and checked before any tensor is read."""
        from safetensors import SafetensorError, safe_open

        indexed = self._weight_map if (self.folder / INDEX).is_file() else {}
        files = sorted(set(indexed.values())) or [WEIGHTS]
        shards: dict[str, Any] = {}
        problems = []
        for file in files:
            path = self.folder / file
            if not path.is_file():
                problems.append(f"{file} is missing")
                continue
            try:
                shards[file] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                problems.append(f"{file} is truncated or not a safetensors file ({error})")
        held = {file: set(shard.keys()) for file, shard in shards.items()}
        problems += [
            f"{file} lacks {name}" for name, file in indexed.items() if file in held and name not in held[file]
        ]
        if problems:
            raise CheckpointError(f"cannot load the weights in {self.folder}: {'; '.join(problems)}. {self._advice()}")
        return shards

    def _advice(self) -> str:
        if not (self.folder / INDEX).is_file() and any(self.folder.glob("*.bin")):
            return "Only safetensors are read: convert with transformers' save_pretrained."
        return "Download the files again."
