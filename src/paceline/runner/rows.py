"""The rows that hold a seat, kept on the host in arrays, so that preparing a step takes a few numpy calls."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.engine.step import RowStart, Step

Ints = NDArray[np.int64]


def table_bytes(max_rows: int, max_model_len: int, block_size: int, num_groups: int) -> int:
    """Memory that `Rows` takes when every row is full."""
    max_len = max_model_len + 1
    return 8 * max_rows * (max_len + num_groups * -(-max_len // block_size))


@dataclass(frozen=True, slots=True)
class Chunks:
    """What each row computes in one step. ``n`` rows, T tokens, row after row; rows that rest are left out, and those
    that compute one token come first."""

    rows: Ints
    """``[n]``."""
    first: Ints
    """``[n]``: position of the first token that the row computes."""
    context_len: Ints
    """``[n]``: tokens of the row once they are computed."""
    query_start: Ints
    """``[n + 1]``: token ``query_start[i]`` of the step is the first of ``rows[i]``."""
    token_index: Ints
    """``[T]``: place of each token's row in ``rows``."""
    positions: Ints
    """``[T]``: position of each token in its row."""
    single_rows: int
    """Rows that compute one token."""

    @classmethod
    def none(cls) -> "Chunks":
        """No row at all."""
        nothing = np.zeros(0, np.int64)
        return cls(nothing, nothing, nothing, np.zeros(1, np.int64), nothing, nothing, 0)

    def padded(self, tokens: int, singles: int, longer: int, sink_row: int) -> "Chunks":
        """The same with places for so many tokens and rows: ``singles`` that compute one token, and ``longer`` others.
        Places that are left have no token, and one row more, the last, computes the tokens that are left."""
        used, count = len(self.rows), singles + longer + 1
        place = np.arange(used)
        place[self.single_rows :] += singles - self.single_rows
        left = tokens - len(self.positions)
        assert left >= 0
        assert self.single_rows <= singles
        assert used - self.single_rows <= longer
        rows, first, query_len = np.full(count, sink_row), np.zeros(count, np.int64), np.zeros(count, np.int64)
        rows[place], first[place], query_len[place] = self.rows, self.first, np.diff(self.query_start)
        query_len[-1] = left
        return Chunks(
            rows=rows,
            first=first,
            context_len=first + query_len,
            query_start=np.concatenate([[0], np.cumsum(query_len)]),
            token_index=np.concatenate([place[self.token_index], np.full(left, count - 1)]),
            positions=np.concatenate([self.positions, np.arange(left)]),
            single_rows=singles,
        )

    @property
    def token_rows(self) -> Ints:
        """Row of each token, ``[T]``."""
        return self.rows[self.token_index]

    @property
    def max_query_len(self) -> int:
        return int(np.diff(self.query_start).max(initial=0))

    @property
    def max_context(self) -> int:
        return int(self.context_len.max(initial=0))


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Prompt tokens of a row whose log-probabilities are wanted and come out of this step."""

    row: int
    first: int
    """Position of the first of them."""
    ids: Ints
    start: int
    """Place in the step of the token whose state predicts the first of them; the others follow."""
    top: int
    """Alternatives to report of each."""


class Rows:
    """Tokens, progress and block tables of all seated rows.

    Attributes:
        tokens: int64 ``[max_rows, max_len]``.
        length: int64 ``[max_rows]``: tokens that the row has.
        computed: int64 ``[max_rows]``: tokens whose keys and values are written.
        tables: one int64 ``[max_rows, max_blocks]`` per KV group.
        starts: what each seated row was started with; iterates in order of seating.
    """

    def __init__(self, max_rows: int, max_model_len: int, block_size: int, num_groups: int) -> None:
        max_len = max_model_len + 1  # a full context still samples, though nobody wants the token
        max_blocks = -(-max_len // block_size)
        self.block_size = block_size
        self.tokens = np.zeros((max_rows, max_len), np.int64)
        self.length = np.zeros(max_rows, np.int64)
        self.computed = np.zeros(max_rows, np.int64)
        self.tables = [np.zeros((max_rows, max_blocks), np.int64) for _ in range(num_groups)]
        self.starts: dict[int, RowStart] = {}
        self._blocks = np.zeros((num_groups, max_rows), np.int64)  # entries filled in each table
        self._seated = np.zeros(0, np.int64)
        self._index: dict[int, int] = {}  # row -> place in _seated
        self._failed: set[int] = set()

    def apply(self, step: Step) -> Chunks:
        """Seats and unseats rows, extends tables, and says what to compute; counts it as computed."""
        for row in step.removed:
            del self.starts[row]
            self._failed.discard(row)
        for start in step.added:
            self._seat(start)
        if step.removed or step.added:
            self._seated = np.fromiter(self.starts, np.int64, len(self.starts))
            self._index = {row: place for place, row in enumerate(self.starts)}
        for row, tables in step.blocks.items():
            self._extend(row, tables)
        return self._advance(step.advance)

    def num_blocks(self, row: int) -> list[int]:
        """Length of the row's table in each KV group."""
        held: list[int] = self._blocks[:, row].tolist()
        return held

    def append(self, rows: Ints, ids: Ints) -> None:
        """The next token of each of ``rows``."""
        self.tokens[rows, self.length[rows]] = ids
        self.length[rows] += 1

    def fail(self, row: int) -> None:
        """Lets the row rest until it is removed: steps already on their way may still name it."""
        self._failed.add(row)

    def block_tables(self, chunks: Chunks) -> Iterator[Ints]:
        """Per KV group the tables of the step's rows, ``[n, blocks of the longest context]``."""
        width = -(-chunks.max_context // self.block_size)
        for table in self.tables:
            yield table[chunks.rows, :width]

    def prompt_parts(self, chunks: Chunks) -> Iterator[PromptPart]:
        """What the step tells of prompts: the state at a position predicts the token after it."""
        for index, row in enumerate(chunks.rows.tolist()):
            start = self.starts[row]
            if start.prompt_logprobs is None:
                continue
            first = int(chunks.first[index]) + 1
            last = min(int(chunks.context_len[index]) + 1, start.prompt_len)
            if first < last:
                place = int(chunks.query_start[index])
                yield PromptPart(row, first, self.tokens[row, first:last], place, start.prompt_logprobs)

    def _seat(self, start: RowStart) -> None:
        row, length = start.row, len(start.tokens)
        assert row not in self.starts, f"row {row} is added twice"
        assert 0 <= start.computed < length, "a row must have a token left to compute"
        self.starts[row] = start
        self.tokens[row, :length] = start.tokens
        self.length[row] = length
        self.computed[row] = start.computed
        self._blocks[:, row] = 0
        self._extend(row, start.blocks)

    def _extend(self, row: int, tables: list[list[int]]) -> None:
        for group, new in enumerate(tables):
            held = self._blocks[group, row]
            self.tables[group][row, held : held + len(new)] = new
            self._blocks[group, row] = held + len(new)

    def _advance(self, advance: dict[int, int]) -> Chunks:
        counts = np.ones(len(self._seated), np.int64)
        for row, count in advance.items():
            counts[self._index[row]] = count
        for row in self._failed:
            counts[self._index[row]] = 0
        singles, longer = np.nonzero(counts == 1)[0], np.nonzero(counts > 1)[0]
        order = np.concatenate([singles, longer])
        rows, counts = self._seated[order], counts[order]
        first = self.computed[rows]
        last = first + counts
        assert np.all(last <= self.length[rows]), "the step computes tokens that are not known"
        assert np.all(last <= self._blocks[:, rows] * self.block_size), "the step computes tokens that have no block"
        self.computed[rows] = last
        query_start = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(counts, out=query_start[1:])
        positions = np.arange(query_start[-1]) + np.repeat(first - query_start[:-1], counts)
        token_index = np.repeat(np.arange(len(rows)), counts)
        return Chunks(rows, first, last, query_start, token_index, positions, len(singles))
