"""What a worker knows of itself."""

import pytest

from paceline.lab.client.self_knowledge import TICK_S, SelfKnowledge, percentiles


def test_a_stall_counts_with_all_the_time_it_took() -> None:
    """A loop that is late once by 1 s in 10 s is late for a tenth of the time, not for one sample of many."""
    knowledge = SelfKnowledge(100.0)
    now = 100.0
    while now < 105:
        knowledge.tick(now)
        now += TICK_S
    knowledge.tick(106.0)
    now = 106.0
    while now < 110:
        if now >= knowledge.next_tick:
            knowledge.tick(now)
        now += TICK_S
    found = knowledge.summary(110.0)
    assert found["loop_delay_p50_s"] < 2 * TICK_S
    assert found["loop_delay_p99_s"] == pytest.approx(0.9, abs=0.02)
    assert found["loop_delay_max_s"] == pytest.approx(1.0, abs=0.01)


def test_percentiles_are_nearest_rank() -> None:
    found = percentiles("x", [float(i) for i in range(1, 1001)])
    assert found == {"x_p50_s": 500.0, "x_p99_s": 990.0, "x_p999_s": 999.0, "x_max_s": 1000.0}
    assert set(percentiles("x", [7.0]).values()) == {7.0}
    assert percentiles("x", []) == {}
