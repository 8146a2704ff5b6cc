"""Notes of what stands in a row, written on the device."""

import numpy as np
import torch

from paceline.kernels.triton.token_notes import BANNED, COUNT_SHIFT, IN_PROMPT, write_notes

SIZES = [(1, 0), (3000, 1500), (20, 1), (1024, 1025)]
"""Tokens of prompts and outputs: none, some, and more than are looked at at once."""


def test_notes_say_what_stands_where(device):
    vocab = 2500
    rng = np.random.default_rng(1)
    rows = [(rng.integers(vocab, size=p).tolist(), [4, 9], rng.integers(40, size=o).tolist()) for p, o in SIZES]
    notes = [torch.full((vocab,), -1, dtype=torch.int32, device=device) for _ in rows]
    write_notes(notes, rows)
    for note, (prompt, banned, output) in zip(notes, rows, strict=True):
        note = note.cpu()
        assert torch.equal(note >> COUNT_SHIFT.value, torch.tensor(output, dtype=torch.int64).bincount(minlength=vocab))
        assert (note & IN_PROMPT.value).nonzero()[:, 0].tolist() == sorted(set(prompt))
        assert (note & BANNED.value).nonzero()[:, 0].tolist() == banned
