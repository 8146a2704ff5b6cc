"""How each seat samples: one record a seat on the device, which the sampling kernels read by the seat's number."""

from typing import Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray

from paceline.kernels.upload import upload

RECORD = np.dtype(
    [
        ("seed", np.int64),
        ("notes", np.int64),  # address of int32 [vocab_size], see `token_notes`; 0: none
        ("bias", np.int64),  # address of float32 [vocab_size], added to the logits; 0: none
        ("top_p", np.float64),  # inf keeps all
        ("temperature", np.float32),  # 0: greedy
        ("min_p", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("repetition", np.float32),
        ("top_k", np.int32),  # of a row that filters: at least 1, and the vocabulary's size keeps all; else 0
        ("candidate", np.int32),
        ("until", np.int32),  # first position where a banned id may stand
    ]
)
"""A seat's parameters. All zero: greedy, nothing filtered or changed."""


def _place(field: str) -> tl.constexpr:
    """Index of a field among words of its own size."""
    assert RECORD.fields is not None
    dtype, offset = RECORD.fields[field][:2]
    return tl.constexpr(offset // dtype.itemsize)


WORDS = tl.constexpr(RECORD.itemsize // 4)
LONGS = tl.constexpr(RECORD.itemsize // 8)
SEED, NOTES, BIAS, TOP_P = map(_place, ("seed", "notes", "bias", "top_p"))
TEMPERATURE, MIN_P = map(_place, ("temperature", "min_p"))
PRESENCE, FREQUENCY, REPETITION = map(_place, ("presence", "frequency", "repetition"))
TOP_K, CANDIDATE, UNTIL = map(_place, ("top_k", "candidate", "until"))


class SeatTable:
    """Records of all seats.

    Attributes:
        longs, doubles, floats, ints: the same memory as int64, float64 ``[seats, LONGS]`` and as float32, int32
            ``[seats, WORDS]``.
        counters: int32 ``[seats]``, zero between launches: programs of a row that are done.
        last_token: int32 ``[seats]``: what each seat sampled last.
    """

    def __init__(self, seats: int, device: torch.device) -> None:
        self.longs = torch.zeros(seats, RECORD.itemsize // 8, dtype=torch.int64, device=device)
        self.doubles = self.longs.view(torch.float64)
        self.floats = self.longs.view(torch.float32)
        self.ints = self.longs.view(torch.int32)
        self.counters = torch.zeros(seats, dtype=torch.int32, device=device)
        self.last_token = torch.zeros(seats, dtype=torch.int32, device=device)

    def write(self, seats: list[int], records: NDArray[Any]) -> None:
        """Replaces the records (``RECORD`` ``[k]``) of ``seats``; the host does not wait."""
        table = np.empty((len(seats), 1 + RECORD.itemsize // 8), np.int64)
        table[:, 0] = seats
        table[:, 1:] = records.view(np.int64).reshape(len(seats), -1)
        uploaded = upload(table, self.longs.device)
        self.longs.index_copy_(0, uploaded[:, 0], uploaded[:, 1:])
