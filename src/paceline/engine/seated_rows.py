"""The rows of a runner, followed through its steps without computing anything."""

from dataclasses import dataclass

from paceline.engine.step import RowStart, Step
from paceline.engine.step_time import StepWork


@dataclass(slots=True, eq=False)
class SeatedRow:
    """One row, as every runner keeps it."""

    start: RowStart
    computed: int
    """Tokens whose keys and values are written."""
    length: int
    """Tokens that it has, the sampled ones too."""
    room: int
    """Tokens that its blocks hold."""


class SeatedRows:
    """Applies steps in order.

    Args:
        block_size: tokens in a KV block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._rows: dict[int, SeatedRow] = {}
        self._next: int | None = None

    def apply(self, step: Step) -> tuple[StepWork, list[SeatedRow]]:
        """Advances every row; returns what the step has to do, and the rows that sample, their ``length`` with the new
        token. Asserts that steps come in order and name what there is."""
        assert self._next is None or step.id == self._next, "steps out of order"
        self._next = step.id + 1
        rows, size = self._rows, self._block_size
        for row in step.removed:
            del rows[row]
        for start in step.added:
            assert start.row not in rows, "row added twice"
            assert 0 <= start.computed < len(start.tokens), "nothing to compute"
            room = len(start.blocks[0]) * size
            rows[start.row] = SeatedRow(start, start.computed, len(start.tokens), room)
        for row, tables in step.blocks.items():
            rows[row].room += len(tables[0]) * size
        work = StepWork()
        sampled: list[SeatedRow] = []
        advance = step.advance
        one = [state for row, state in rows.items() if row not in advance] if advance else rows.values()
        for state in one:
            state.computed = computed = state.computed + 1
            assert computed <= state.room, "a token's keys have no block"
            work.kv_tokens += computed
            if computed == state.length:
                state.length = computed + 1
                sampled.append(state)
            assert computed < state.length, "a step computes tokens that are not known"
        work.tokens = len(one)
        for row, count in advance.items():
            if count:
                self._advance(rows[row], count, work, sampled)
        work.rows = len(sampled)
        return work, sampled

    @staticmethod
    def _advance(state: SeatedRow, count: int, work: StepWork, sampled: list[SeatedRow]) -> None:
        context = state.computed
        state.computed = computed = context + count
        assert computed <= state.room, "a token's keys have no block"
        assert computed <= state.length, "a step computes tokens that are not known"
        if computed == state.length:
            state.length += 1
            sampled.append(state)
        work.tokens += count
        work.prompt_pairs += count * context + count * (count + 1) // 2
