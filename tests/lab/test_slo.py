"""Constraints as users write them."""

import pytest
from made_replies import reply

from paceline.lab.slo import PRESETS, Constraint, InvalidConstraint, parse_constraints


@pytest.mark.parametrize(
    ("text", "metric", "statistic", "comparison", "limit"),
    [
        ("ttft_p99 < 1s", "ttft", "p99", "<", 1.0),
        ("tpot_mean<20ms", "tpot", "mean", "<", 0.020),
        ("itl_p95<=50ms", "itl", "p95", "<=", 0.050),
        (" e2e_p50 < 10 s ", "e2e", "p50", "<", 10.0),
        ("itl_max <= 1500us", "itl", "max", "<=", 0.0015),
        ("ttft_p90 < .5s", "ttft", "p90", "<", 0.5),
    ],
)
def test_forms(text: str, metric: str, statistic: str, comparison: str, limit: float) -> None:
    found = Constraint.parse(text)
    assert (found.metric, found.statistic, found.comparison) == (metric, statistic, comparison)
    assert found.limit_s == pytest.approx(limit)
    assert found.text == text.strip()


@pytest.mark.parametrize(
    "text",
    [
        "ttft < 1s", "ttft_p99 < 1", "ttft_p99 > 1s", "ttft_p98 < 1s", "speed_p99 < 1s", "ttft_p99 < -1s",
        "ttft_p99 < 1 min", "ttft_p99 = 1s", "ttft_p99 < 0s", "ttft_p99 < 1s;", "", "TTFT_P99 < 1s", "ttft_p99 < nans",
    ],
)  # fmt: skip
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(InvalidConstraint):
        Constraint.parse(text)


def test_the_message_says_what_would_do() -> None:
    with pytest.raises(InvalidConstraint, match=r"'ttft < 1s' is no constraint.*'ttft_p99 < 1s'.*ms or s"):
        Constraint.parse("ttft < 1s")
    with pytest.raises(InvalidConstraint, match=r"no preset named 'fast'; known are mlperf-llama3\.1-8b"):
        parse_constraints("fast")
    with pytest.raises(InvalidConstraint, match="ttft_p99 is limited twice"):
        parse_constraints("interactive, ttft_p99 < 1s")


def test_lists_and_presets() -> None:
    assert [item.text for item in parse_constraints("ttft_p99<1s, tpot_mean<20ms")] == ["ttft_p99<1s", "tpot_mean<20ms"]
    assert parse_constraints("") == []
    assert [item.metric for item in parse_constraints("interactive, e2e_p99 < 10s")] == ["ttft", "tpot", "e2e"]
    for name in PRESETS:
        assert parse_constraints(name)


@pytest.mark.parametrize(
    ("name", "ttft", "tpot"),
    [
        ("mlperf-llama3.1-8b", 2.0, 0.1),
        ("mlperf-llama3.1-8b-interactive", 0.5, 0.03),
        ("mlperf-llama2-70b", 2.0, 0.2),
        ("mlperf-llama2-70b-interactive", 0.45, 0.04),
        ("mlperf-deepseek-r1", 2.0, 0.08),
        ("mlperf-deepseek-r1-interactive", 1.5, 0.015),
    ],
)
def test_mlperf_limits(name: str, ttft: float, tpot: float) -> None:
    first, second = parse_constraints(name)
    assert (first.metric, first.statistic, first.limit_s) == ("ttft", "p99", pytest.approx(ttft))
    assert (second.metric, second.statistic, second.limit_s) == ("tpot", "p99", pytest.approx(tpot))


def test_at_the_limit() -> None:
    assert Constraint.parse("e2e_max <= 1s").keeps(1.0) is True
    assert Constraint.parse("e2e_max < 1s").keeps(1.0) is False
    assert Constraint.parse("e2e_max < 1s").keeps(None) is None


def test_a_request_keeps_a_constraint_by_its_own_value() -> None:
    ttft, gap = parse_constraints("ttft_p99 < 200ms, itl_mean < 200ms")
    fine = reply(0, 0.0, [(0.1, 1), (0.2, 1)])
    assert ttft.keeps(ttft.of(fine))
    assert gap.keeps(gap.of(fine))
    assert gap.of(fine) == pytest.approx(0.1)
    failed = reply(0, 0.0, [(0.1, 1), (0.2, 1)], error="cut")
    assert (ttft.of(failed), gap.of(failed)) == (None, None)
    assert ttft.keeps(None) is None
    single = reply(0, 0.0, [(0.1, 1)])
    assert (ttft.keeps(ttft.of(single)), gap.of(single)) == (True, None)  # no gap was measured
    assert ttft.keeps(ttft.of(reply(0, 0.0, [(0.3, 1), (0.4, 1)]))) is False
