"""Rows and chunks against the fake runner's plain lists."""

import numpy as np
import pytest

from paceline.engine.sampling_params import SamplingParams
from paceline.engine.step import RowStart, Step
from paceline.runner.rows import Chunks, Rows


def start(row: int, tokens: list[int], blocks: list[list[int]], computed: int = 0) -> RowStart:
    return RowStart(row, tokens, len(tokens), computed, blocks, SamplingParams(), 0, 0, [], None)


def rows() -> Rows:
    return Rows(max_rows=8, max_model_len=20, block_size=4, num_groups=2)


def test_chunks_of_rows_at_different_phases():
    state = rows()
    first = state.apply(
        Step(
            0,
            added=[start(5, [10, 11, 12, 13, 14, 15], [[3, 4], [7, 0]]), start(2, [20, 21], [[6], [1]])],
            advance={5: 5, 2: 2},
        )
    )
    assert first.rows.tolist() == [5, 2]
    assert first.query_start.tolist() == [0, 5, 7]
    assert first.positions.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert first.token_rows.tolist() == [5, 5, 5, 5, 5, 2, 2]
    assert first.context_len.tolist() == [5, 2]
    assert (first.single_rows, first.max_query_len, first.max_context) == (0, 5, 5)
    assert [table.tolist() for table in state.block_tables(first)] == [[[3, 4], [6, 0]], [[7, 0], [1, 0]]]
    state.append(np.array([2]), np.array([22]))

    second = state.apply(
        Step(1, removed=[], added=[start(0, [1, 2, 3], [[9], [9]], computed=2)], blocks={5: [[8], [8]]})
    )
    assert second.rows.tolist() == [5, 2, 0]
    assert (second.single_rows, second.max_query_len, second.max_context) == (3, 1, 6)
    assert second.positions.tolist() == [5, 2, 2]
    assert state.tokens[second.token_rows, second.positions].tolist() == [15, 22, 3]

    state.append(np.array([5]), np.array([16]))
    third = state.apply(Step(2, removed=[0], advance={2: 0}))
    assert third.rows.tolist() == [5]
    assert third.positions.tolist() == [6]


def test_a_row_id_is_used_again():
    state = rows()
    state.apply(Step(0, added=[start(1, [5] * 9, [[2, 3, 4], [2, 3, 4]])], advance={1: 9}))
    chunks = state.apply(Step(1, removed=[1], added=[start(1, [6, 7], [[5], [6]])], advance={1: 2}))
    assert state.tokens[1, :2].tolist() == [6, 7]
    assert [table.tolist() for table in state.block_tables(chunks)] == [[[5]], [[6]]]
    assert chunks.positions.tolist() == [0, 1]
    assert list(state.starts) == [1]


def test_a_failed_row_rests_until_it_is_removed():
    state = rows()
    state.apply(Step(0, added=[start(1, [5], [[2], [2]]), start(3, [6], [[3], [3]])]))
    state.append(np.array([3]), np.array([8]))
    state.fail(1)
    assert state.apply(Step(1)).rows.tolist() == [3]
    state.append(np.array([3]), np.array([8]))
    assert state.apply(Step(2, removed=[1], added=[start(1, [7], [[4], [4]])])).rows.tolist() == [3, 1]


def test_all_rows_may_rest_and_leave():
    state = rows()
    assert len(state.apply(Step(0)).rows) == 0
    assert len(state.apply(Step(1, added=[start(1, [5], [[2], [2]])], advance={1: 0})).positions) == 0
    assert len(state.apply(Step(2, removed=[1])).positions) == 0


def test_steps_that_cannot_be_carried_out():
    state = rows()
    state.apply(Step(0, added=[start(1, [5], [[2], [2]])]))
    with pytest.raises(AssertionError, match="not known"):
        state.apply(Step(1))
    with pytest.raises(AssertionError, match="twice"):
        state.apply(Step(2, added=[start(1, [5], [[2], [2]])]))
    with pytest.raises(AssertionError, match="no block"):
        rows().apply(Step(0, added=[start(1, [5] * 5, [[2], [2, 3]])], advance={1: 5}))


def test_rows_of_one_token_come_first():
    state = rows()
    state.apply(Step(0, added=[start(3, [5] * 9, [[2, 3, 4], [2, 3, 4]])], advance={3: 2}))
    chunks = state.apply(Step(1, added=[start(1, [6], [[5], [6]]), start(0, [7], [[1], [1]])], advance={3: 4}))
    assert chunks.rows.tolist() == [1, 0, 3]
    assert chunks.single_rows == 2
    assert chunks.token_rows.tolist() == [1, 0, 3, 3, 3, 3]
    assert chunks.positions.tolist() == [0, 0, 2, 3, 4, 5]


def test_places_that_are_left_hold_padding():
    state = rows()
    added = [start(5, [1, 2, 3], [[3], [4]]), start(2, [4], [[6], [1]]), start(0, [5, 6], [[7], [7]])]
    chunks = state.apply(Step(0, added=added, advance={5: 3, 0: 2}))
    padded = chunks.padded(tokens=9, singles=3, longer=3, sink_row=8)
    assert padded.rows.tolist() == [2, 8, 8, 5, 0, 8, 8]
    assert padded.context_len.tolist() == [1, 0, 0, 3, 2, 0, 3]
    assert padded.query_start.tolist() == [0, 1, 1, 1, 4, 6, 6, 9]
    assert padded.positions.tolist() == [0, 0, 1, 2, 0, 1, 0, 1, 2]
    assert padded.token_rows.tolist() == [2, 5, 5, 5, 0, 0, 8, 8, 8]
    assert padded.single_rows == 3
    nothing = Chunks.none().padded(tokens=2, singles=1, longer=1, sink_row=8)
    assert nothing.token_rows.tolist() == [8, 8]
    assert nothing.query_start.tolist() == [0, 0, 0, 2]
