"""A device and engine to simulate, as a JSON file."""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from paceline.engine.step_time import StepTime

SCHEMA_VERSION = 1
SHIPPED = Path(__file__).parent / "models"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSizes:
    """Limits of the engine on that device; those of `EngineConfig` that have the same names, and the KV cache."""

    block_size: int = 64
    num_blocks: int
    """KV blocks, the sink included."""
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 1024
    max_model_len: int
    depth: int = 2

    def __post_init__(self) -> None:
        for found in fields(self):
            value = getattr(self, found.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"engine.{found.name}: must be a whole number, at least 1, not {value!r}")
        if (self.num_blocks - 1) * self.block_size < self.max_model_len:
            raise ValueError(
                f"engine.num_blocks: {self.num_blocks} blocks of {self.block_size} tokens, one of them the sink, do "
                f"not hold one sequence of max_model_len={self.max_model_len}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuModel:
    """What a simulation needs to know of one replica, and where the numbers come from."""

    name: str
    step_time: StepTime
    engine: EngineSizes
    request_s: float = 0.0
    """What a request spends outside of the engine: from the client's send to the engine's queue, and back."""
    machine: str = ""
    """GPU, model and precision."""
    fitted: str = ""
    """From what, and how."""
    error: dict[str, float] = field(default_factory=dict)
    """Of the fit, relative: ``mean``, ``p95`` and so on."""

    def save(self, path: Path) -> None:
        document = {"schema_version": SCHEMA_VERSION, **asdict(self)}
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, name: str) -> "GpuModel":
        """Reads a file, or a model that comes with paceline by its name.

        Raises:
            ValueError: there is none, or it is damaged; says what is wrong.
        """
        path = Path(name)
        if not path.is_file():
            path = SHIPPED / f"{name}.json"
        if not path.is_file():
            shipped = ", ".join(sorted(file.stem for file in SHIPPED.glob("*.json")))
            raise ValueError(f"no GPU model {name!r}: give a JSON file, or one of {shipped}")
        try:
            return cls._parse(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is no GPU model: {error}") from error

    @classmethod
    def _parse(cls, document: Any) -> "GpuModel":
        if not isinstance(document, dict) or document.pop("schema_version", None) != SCHEMA_VERSION:
            raise ValueError(f"schema_version must be {SCHEMA_VERSION}")
        for name in ("step_time", "engine"):
            if not isinstance(document.get(name), dict):
                raise ValueError(f"{name} is missing")
        document["step_time"] = StepTime(**document["step_time"])
        document["engine"] = EngineSizes(**document["engine"])
        model = cls(**document)
        if not isinstance(model.request_s, int | float) or not 0 <= model.request_s < float("inf"):
            raise ValueError(f"request_s: must be a number of seconds, at least 0, not {model.request_s!r}")
        return model
