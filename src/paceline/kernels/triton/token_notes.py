"""What is known of each token of the vocabulary in one row: int32 ``[vocab_size]``.

Bit 0: the prompt holds it. Bit 1: it is banned for a while. The bits above: how often the output holds it.
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.upload import upload

IN_PROMPT = tl.constexpr(1)
BANNED = tl.constexpr(2)
COUNT_SHIFT = tl.constexpr(2)
ONCE = tl.constexpr(1 << 2)
"""One more time in the output."""


@triton.jit(do_not_specialize_on_alignment=["starts", "tokens"])
def _write(addresses, starts, tokens, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    notes = tl.load(addresses + row).to(tl.pointer_type(tl.int32))
    place = tl.arange(0, BLOCK)
    first = 0
    while first < vocab_size:
        tl.store(notes + first + place, tl.zeros((BLOCK,), tl.int32), mask=first + place < vocab_size)
        first += BLOCK
    tl.debug_barrier()
    for kind in tl.static_range(3):
        first = tl.load(starts + 3 * row + kind)
        end = tl.load(starts + 3 * row + kind + 1)
        while first < end:
            inside = first + place < end
            ids = tl.load(tokens + first + place, mask=inside, other=0)
            if kind == 0:
                tl.atomic_or(notes + ids, IN_PROMPT, mask=inside)
            elif kind == 1:
                tl.atomic_or(notes + ids, BANNED, mask=inside)
            else:
                tl.atomic_add(notes + ids, ONCE, mask=inside)
            first += BLOCK


def write_notes(notes: Sequence[Tensor], tokens: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]]) -> None:
    """Replaces notes by what is known of prompts, banned ids and outputs. The host does not wait.

    Args:
        notes: int32 ``[vocab_size]`` each, on one device.
        tokens: for each its (prompt, banned ids, output); all ids are below ``vocab_size``.
    """
    device = notes[0].device
    lists = [ids for row in tokens for ids in row]
    addresses = np.array([note.data_ptr() for note in notes], np.int64)
    starts = np.zeros(len(lists) + 1, np.int32)
    np.cumsum([len(ids) for ids in lists], out=starts[1:])
    flat = np.concatenate([np.asarray(ids, np.int32) for ids in lists])
    words = upload(np.concatenate([addresses.view(np.int32), starts, flat]), device)
    head = 2 * len(notes)
    _write[(len(notes),)](
        words[:head].view(torch.int64),
        words[head : head + len(starts)],
        words[head + len(starts) :],
        len(notes[0]),
        BLOCK=1024,
    )
