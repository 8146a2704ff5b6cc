"""What a GPU keeps of the seated rows between steps, and how a step's input gets there."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.engine.step import Step
from paceline.kernels.upload import upload
from paceline.runner.rows import Ints, Rows

ON_DEVICE = -1
"""Stands for a token that was sampled on the device and that the host need not know."""


class DeviceRows:
    """Block tables of all rows, on the device.

    Attributes:
        sink_row: a row that nobody holds, whose table points to the sink: padding stands in it.
        tables: per KV group int32 ``[max_rows + 1, max_blocks]``.
    """

    def __init__(self, rows: Rows, device: torch.device) -> None:
        self._rows, self._device = rows, device
        self.sink_row = len(rows.length)
        self.tables = [
            torch.zeros(len(table) + 1, table.shape[1], dtype=torch.int32, device=device) for table in rows.tables
        ]

    def extend(self, step: Step) -> None:
        """Copies the block ids that ``step`` brings. Called before the host's rows apply the step."""
        none = [0] * len(self.tables)
        new = [(start.row, none, start.blocks) for start in step.added]
        new += [(row, self._rows.num_blocks(row), blocks) for row, blocks in step.blocks.items()]
        if not new:
            return
        for group, table in enumerate(self.tables):
            width = table.shape[1]
            blocks = [tables[group] for _, _, tables in new]
            count = [len(ids) for ids in blocks]
            if not any(count):
                continue
            first = np.array([row * width + held[group] for row, held, _ in new])
            place = np.repeat(first - np.cumsum([0, *count[:-1]]), count) + np.arange(sum(count))
            entries = upload(np.stack([place, np.concatenate(blocks)]).astype(np.int32), self._device)
            table.view(-1).index_copy_(0, entries[0].long(), entries[1])

    def forget(self) -> None:
        """Frees the memory."""
        self.tables = []


ALIGNMENT = 4
"""Entries of int32. Triton compiles a kernel again for a pointer that is not aligned to 16 bytes."""


def places(lengths: Iterable[int]) -> list[slice]:
    """Where parts of these lengths lie one after the other, aligned."""
    slices, end = [], 0
    for length in lengths:
        slices.append(slice(end, end + length))
        end += -(-length // ALIGNMENT) * ALIGNMENT
    return slices


def concatenated(parts: Sequence[Ints]) -> tuple[NDArray[np.int32], list[slice]]:
    """All parts, and their `places`."""
    slices = places(map(len, parts))
    joined = np.zeros(slices[-1].stop, np.int32)
    for part, place in zip(parts, slices, strict=True):
        joined[place] = part
    return joined, slices
