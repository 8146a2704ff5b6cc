"""A runner without a model: the next token is a fixed function of all tokens before it.

It keeps rows exactly as a real runner must, and reads every token back through the block tables, so that a wrong
block, a block shared by mistake, or a step out of order changes the output or trips an assert.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.engine.step import SINK_BLOCK, KVGroup, RowStart, Step, StepResult, TokenLogprobs


def next_token(context: Sequence[int], vocab_size: int, seed: int = 0, candidate: int = 0) -> int:
    """The token that the fake model puts after ``context`` (int64 ids), for a seed and a candidate."""
    digest = hashlib.blake2b(repr((list(context), seed, candidate)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % vocab_size


@dataclass
class Row:
    start: RowStart
    tokens: list[int]
    computed: int
    tables: list[list[int]]


@dataclass
class Done:
    """A handle whose result is known from the start, or an error that it raises."""

    value: StepResult | Exception

    def result(self) -> StepResult:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


@dataclass
class FakeRunner:
    """Applies steps at submission; with a pipeline of depth 2 the core simply reads results late.

    Attributes:
        kv_groups: as a real runner reports them.
        block_size: tokens in a block.
        vocab_size: ids are below this.
        sampled_by_seed: whether the next token also depends on the row's (seed, candidate).
    """

    kv_groups: list[KVGroup]
    block_size: int = 4
    vocab_size: int = 97
    sampled_by_seed: bool = False
    fail_row_at: dict[int, int] = field(default_factory=dict)
    """Sequence length -> steps that sample at this length report an error for the row."""
    closed: bool = False

    def __post_init__(self) -> None:
        self.rows: dict[int, Row] = {}
        self.steps: list[Step] = []
        # One cell a slot: (position, token) last written there.
        self.slots: list[list[tuple[int, int] | None]] = [
            [None] * (group.num_blocks * self.block_size) for group in self.kv_groups
        ]

    def submit(self, step: Step) -> Done:
        assert not self.closed
        assert not self.steps or step.id == self.steps[-1].id + 1, "steps out of order"
        self.steps.append(step)
        return Done(self._apply(step))

    def idle(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True

    def _apply(self, step: Step) -> StepResult:
        for row in step.removed:
            del self.rows[row]
        for start in step.added:
            assert start.row not in self.rows, "row added twice"
            assert 0 <= start.computed < len(start.tokens)
            self.rows[start.row] = Row(
                start, list(start.tokens), start.computed, [list(table) for table in start.blocks]
            )
        for row, tables in step.blocks.items():
            for table, new in zip(self.rows[row].tables, tables, strict=True):
                table.extend(new)
        result = StepResult()
        for row, state in self.rows.items():
            self._compute(row, state, step.advance.get(row, 1), result)
        return result

    def _compute(self, row: int, state: Row, count: int, result: StepResult) -> None:
        first, last = state.computed, state.computed + count
        assert last <= len(state.tokens), "step computes tokens that are not known"
        if count == 0:
            return
        for position in range(first, last):
            for group, table in enumerate(state.tables):
                block = table[position // self.block_size]
                assert block != SINK_BLOCK, "a token's keys would be lost in the sink"
                self.slots[group][block * self.block_size + position % self.block_size] = (
                    position,
                    state.tokens[position],
                )
        state.computed = last
        if state.start.prompt_logprobs is not None:
            entries = [
                TokenLogprobs(-float(state.tokens[p]), 1, [], [])
                for p in range(first + 1, min(last + 1, state.start.prompt_len))
            ]
            if entries:
                result.prompt_logprobs[row] = (first + 1, entries)
        if last < len(state.tokens):
            return
        context = self._read_back(state)
        if len(context) in self.fail_row_at:
            result.errors[row] = "the fake runner was told to fail here"
            state.tokens.append(0)
            return
        seed, candidate = (state.start.seed, state.start.candidate) if self.sampled_by_seed else (0, 0)
        token = next_token(context, self.vocab_size, seed, candidate)
        state.tokens.append(token)
        result.rows.append(row)
        result.counts.append(1)
        result.ids.append(token)
        if state.start.params.logprobs is not None:
            result.logprobs[row] = [TokenLogprobs(-float(token), 1, [], [])]

    def _read_back(self, state: Row) -> list[int]:
        """The context as attention sees it: every group must hold what its window reaches."""
        for group, table in enumerate(state.tables):
            window = self.kv_groups[group].window
            start = 0 if window is None else max(0, state.computed - window)
            for position in range(start, state.computed):
                block = table[position // self.block_size]
                cell = self.slots[group][block * self.block_size + position % self.block_size]
                assert cell == (position, state.tokens[position]), (
                    f"group {group}, position {position}: the cache holds {cell}, not {state.tokens[position]}"
                )
        return state.tokens[: state.computed]
