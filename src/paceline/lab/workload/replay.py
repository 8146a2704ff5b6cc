"""Requests from a trace: its lengths and shared prefixes, with random tokens in place of the recorded ones."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.lab.workload.draft import Draft
from paceline.lab.workload.generator import generator
from paceline.lab.workload.traces import TraceRow
from paceline.lab.workload.vocabulary import Vocabulary


def trace_drafts(
    rows: Sequence[TraceRow],
    *,
    vocabulary: Vocabulary,
    sessions: bool = True,
    seconds_per_token: float = 0.0,
    seed: int = 0,
    run: int = 0,
) -> list[Draft]:
    """One request a row.

    A block id stands for the same random tokens wherever it occurs, so prefixes are shared as they were; the last block
    is cut to the prompt's length, and a prompt longer than its blocks goes on with tokens of its own. Lengths of 0
    become 1, the least that can be asked for.

    Args:
        sessions: a turn waits for the reply of the one before and then for as long as the trace says: the time between
            the two, less what the recorded service needed for its reply. False: it is sent at its own time.
        seconds_per_token: what the recorded service needed for each output token, which no trace says; 0 takes the
            whole time between two turns for thinking.
        seed, run: both together choose the tokens.
    """
    key = int(generator(seed, "blocks", run).integers(2**63))
    own = generator(seed, "tokens", run)
    index_of: dict[str, int] = {}
    drafts = []
    for index, row in enumerate(rows):
        size = max(1, row.input_tokens)
        draws = _block_draws(row, key, len(vocabulary))[:size]
        if len(draws) < size:
            draws = np.concatenate([draws, vocabulary.draw(size - len(draws), own)])
        after, delay = None, 0.0
        if sessions and row.parent in index_of:
            after = index_of[row.parent]
            before = rows[after]
            delay = max(0.0, row.time_s - before.time_s - seconds_per_token * before.output_tokens)
        if row.chat is not None:
            index_of[row.chat] = index
        drafts.append(
            Draft(
                vocabulary.prompt(draws),
                max(1, row.output_tokens),
                vocabulary.tokens(size),
                after=after,
                delay_s=delay,
                time_s=row.time_s,
            )
        )
    return drafts


def _block_draws(row: TraceRow, key: int, size: int) -> NDArray[np.int64]:
    """Draws below ``size`` for every token of the row's blocks, int64 [blocks * block_tokens].

    A hash of (key, block, place) instead of a generator a block: a trace has hundreds of thousands of blocks. The
    mixing is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
    """
    starts = [block * row.block_tokens % 2**64 for block in row.blocks]
    counter = np.add.outer(np.array(starts, np.uint64), np.arange(row.block_tokens, dtype=np.uint64)).ravel()
    z: NDArray[np.uint64] = counter * np.uint64(0x9E3779B97F4A7C15)
    z += np.uint64(key)
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    draws: NDArray[np.int64] = ((z >> np.uint64(32)) * np.uint64(size) >> np.uint64(32)).astype(np.int64)
    return draws
