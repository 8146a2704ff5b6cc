"""Which way of computing a linear layer is fastest at which shape: measured once a GPU, kept as data."""

import json
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    """Tiles of `paceline.kernels.triton.skinny_linear`."""

    block_n: int
    """Rows of the weight a program handles."""
    block_k: int
    """Columns a step."""
    splits: int
    """Programs that share a row's columns; each writes its own partial sum."""
    stages: int
    """Depth of the software pipeline."""
    warps: int


@dataclass(frozen=True, slots=True)
class RingConfig:
    """Tiles of `paceline.kernels.triton.ring_linear`."""

    block_n: int
    """Rows of the weight a program handles, a multiple of 64."""
    block_k: int
    """Columns a step."""
    splits: int
    """Programs that share a row's columns; each writes its own partial sum."""
    stages: int
    """Tiles in the ring."""
    warps: int
    late: bool = False
    """With dependent launch: the kernel behind may start when the last tile is multiplied, not at once."""


@dataclass(frozen=True, slots=True)
class GemvConfig:
    """Tiles of `paceline.kernels.triton.gemv`."""

    block_n: int
    """Rows of the weight a step."""
    block_k: int
    """Columns a program keeps in registers, a power of 2. Fewer than K: partial sums."""
    programs: int
    """At most so many programs for each part of K."""
    stages: int
    """Depth of the ring of weights."""
    warps: int


@dataclass(frozen=True, slots=True)
class Cublas:
    """The library's matrix product."""


Choice = SkinnyConfig | RingConfig | GemvConfig | Cublas

_METHODS: dict[str, type[SkinnyConfig] | type[RingConfig] | type[GemvConfig] | type[Cublas]] = {
    "skinny": SkinnyConfig,
    "ring": RingConfig,
    "gemv": GemvConfig,
    "cublas": Cublas,
}
_NAMES = {method: name for name, method in _METHODS.items()}


@dataclass(frozen=True, slots=True)
class LinearShape:
    """What a choice depends on."""

    op: str
    """``linear``, or ``gate_up``: with SiLU and the product, whose weight has 2 n rows. ``norm_linear`` and
    ``norm_gate_up``: with the norm in front, by `paceline.kernels.triton.gemv`."""
    rows: int
    """Tokens."""
    n: int
    """Columns of the result."""
    k: int
    dtype: str
    """``bf16``; ``w8a8``: weight and activations in FP8; ``w8a16``: the weight alone."""


@dataclass(frozen=True, slots=True)
class LinearTable:
    """Choices of one GPU. A choice serves all numbers of rows down to the next smaller measured one."""

    device: str
    """As `torch.cuda.get_device_name` says."""
    choices: dict[LinearShape, Choice]

    def choose(self, shape: LinearShape) -> Choice | None:
        """What was fastest at the smallest measured number of rows that holds ``shape``; None where none was."""
        fitting = [
            known
            for known in self.choices
            if (known.op, known.n, known.k, known.dtype) == (shape.op, shape.n, shape.k, shape.dtype)
            and known.rows >= shape.rows
        ]
        return self.choices[min(fitting, key=lambda known: known.rows)] if fitting else None

    def to_json(self) -> str:
        entries = [
            {**asdict(shape), "method": _NAMES[type(choice)], **({"config": asdict(choice)} if asdict(choice) else {})}
            for shape, choice in self.choices.items()
        ]
        lines = ",\n".join("    " + json.dumps(entry) for entry in entries)
        return f'{{\n  "device": {json.dumps(self.device)},\n  "linear": [\n{lines}\n  ]\n}}\n'

    @classmethod
    def from_json(cls, text: str) -> "LinearTable":
        """Raises KeyError or TypeError where the text is no table."""
        data: dict[str, Any] = json.loads(text)
        choices: dict[LinearShape, Choice] = {}
        for entry in data["linear"]:
            method, config = _METHODS[entry.pop("method")], entry.pop("config", {})
            choices[LinearShape(**entry)] = method(**config)
        return cls(data["device"], choices)


def load_table(path: Path) -> LinearTable:
    """A table that was written by `LinearTable.to_json`."""
    return LinearTable.from_json(path.read_text())


def shipped_table(device: str) -> LinearTable | None:
    """The table that comes with the package for the GPU of this name; None if there is none."""
    for file in sorted(resources.files("paceline.kernels").joinpath("tables").iterdir(), key=lambda file: file.name):
        table = LinearTable.from_json(file.read_text())
        if table.device == device:
            return table
    return None
