"""Every figure of a point against figures worked out by hand, or by plain Python."""

import math
import random
from dataclasses import replace

import pytest
from made_replies import log_of, reply, steady

from paceline.lab.measure import measure
from paceline.lab.point import Statistics
from paceline.lab.record import RequestRecord
from paceline.lab.slo import parse_constraints

NOTHING = Statistics(None, None, None, None, None, None)


def test_three_requests_by_hand() -> None:
    records = [
        reply(0, 0.0, [(0.2, 1), (0.3, 1), (0.5, 1)]),  # tpot 0.15, gaps 0.1 0.2
        reply(1, 1.0, [(1.4, 1), (1.7, 3)], sent=1.1, ended=1.75, prompt_tokens=7),  # tpot 0.1, gaps 3 x 0.1
        reply(2, 2.0, [(2.6, 1), (3.6, 1)], ended=4.0),  # tpot 1.0, gap 1.0
    ]
    point = measure(log_of(records), parse_constraints("ttft_p50 < 500ms, tpot_max<=1s"))
    assert point.ttft_s.mean == pytest.approx((0.2 + 0.4 + 0.6) / 3)
    assert (point.ttft_s.p50, point.ttft_s.max) == (pytest.approx(0.4), pytest.approx(0.6))
    assert point.ttft_s.p90 == pytest.approx(0.4 + 0.8 * 0.2)  # a share of 0.9 of two gaps between three values
    assert point.ttft_from_send_s.mean == pytest.approx((0.2 + 0.3 + 0.6) / 3)
    assert point.tpot_s.mean == pytest.approx((0.15 + 0.1 + 1.0) / 3)
    assert point.itl_s.mean == pytest.approx((0.1 + 0.2 + 3 * 0.1 + 1.0) / 6)
    assert point.itl_s.p50 == pytest.approx(0.1)
    assert point.e2e_s.mean == pytest.approx((0.5 + 0.7 + 1.6) / 3)
    assert point.window_s == pytest.approx(3.6)  # the last token, not the end of the body
    assert (point.output_tokens, point.prompt_tokens) == (9, 7)
    assert point.output_tokens_per_s == pytest.approx(9 / 3.6)
    assert point.requests_per_s == pytest.approx(3 / 3.6)
    assert point.attainment == pytest.approx(2 / 3)  # the last one's TTFT is too long
    assert point.goodput_rps == pytest.approx(2 / 3.6)
    assert point.constraints == {"ttft_p50 < 500ms": True, "tpot_max<=1s": True}


def test_each_request_has_one_vote_in_tpot() -> None:
    """failure 97"""
    short = reply(0, 0.0, [(1.0, 1), (1.5, 1)])
    long = reply(1, 0.0, [(1.0 + 0.01 * place, 1) for place in range(1000)])
    point = measure(log_of([short, long]))
    assert point.tpot_s.mean == pytest.approx((0.5 + 0.01) / 2)
    assert point.tpot_s.max == pytest.approx(0.5)  # and not e2e / n, 0.75
    assert point.itl_s.mean == pytest.approx((0.5 + 9.99) / 1000)  # each token has one


@pytest.mark.parametrize(
    "record",
    [
        reply(0, 0.0, [(0.1, 1)]),
        reply(0, 0.0, [(0.1, 16)]),
        reply(0, 0.0, [(0.1, 8), (0.1, 8)]),
        reply(0, 0.0, [(0.1, 1), (0.2, 1)], output_tokens=None),
        reply(0, 0.0, [], ended=0.1),
    ],
    ids=["one token", "one chunk", "at one time", "no usage", "no times"],
)
def test_tpot_not_measured_is_null_and_keeps_nothing(record: RequestRecord) -> None:
    """failure 98"""
    point = measure(log_of([record] * 3), parse_constraints("tpot_mean < 1s"))
    assert point.tpot_s == NOTHING
    assert point.constraints == {"tpot_mean < 1s": None}
    assert point.attainment == 0.0
    assert point.goodput_rps == 0.0


def test_failures_are_in_no_latency_and_against_goodput() -> None:
    fine = [steady(id, 0.1 * id) for id in range(6)]
    late = steady(6, 0.6, ttft=50.0, error="the stage's deadline", ended=60.0)
    refused = RequestRecord(7, 0.7, error="connection refused")
    point = measure(log_of([*fine, late, refused]), parse_constraints("ttft_p50 < 1s"))
    assert (point.requests.sent, point.requests.ok, point.requests.failed) == (7, 6, 2)
    assert point.ttft_s.max == pytest.approx(0.1)
    assert point.errors == {"the stage's deadline": 1, "connection refused": 1}
    assert point.window_s == pytest.approx(0.5 + 0.1 + 0.07)
    assert point.output_tokens == 6 * 8
    assert point.attainment == pytest.approx(6 / 8)
    assert point.goodput_rps == pytest.approx(6 / 0.67)
    assert not point.valid


@pytest.mark.parametrize("slo", ["ttft_p99 < 1s", "e2e_p99 < 5s", "tpot_p99 < 1s", "itl_p99 < 1s"])
def test_a_percentile_is_a_promise_to_all_requests(slo: str) -> None:
    """Ten of a thousand fail, and nine are too slow: 98.1% kept it, though the p99 of those completed is within."""
    records = [steady(id, 0.02 * id, tpot=0.05) for id in range(1000)]
    for id in range(100, 110):
        records[id].error = "HTTP 429"
    assert measure(log_of(records), parse_constraints(slo)).constraints == {slo: True}
    for id in range(200, 209):
        records[id] = steady(id, 0.02 * id, ttft=9.0, tpot=2.0)
    point = measure(log_of(records), parse_constraints(slo))
    assert point.valid
    assert point.attainment == pytest.approx(0.981)
    assert point.constraints == {slo: False}


def test_a_maximum_is_not_kept_where_a_request_failed() -> None:
    records = [steady(id, 0.1 * id) for id in range(200)]
    slo = parse_constraints("ttft_max < 1s, ttft_mean < 1s")
    assert set(measure(log_of(records), slo).constraints.values()) == {True}
    records[7].error = "HTTP 500"
    assert list(measure(log_of(records), slo).constraints.values()) == [False, True]


def test_replies_of_one_token_have_no_tpot_to_keep() -> None:
    records = [steady(id, 0.1 * id, tokens=1 if id % 2 else 8) for id in range(600)]
    assert measure(log_of(records), parse_constraints("tpot_p99 < 1s")).constraints == {"tpot_p99 < 1s": True}


def test_all_failed_is_null_not_zero() -> None:
    point = measure(log_of([steady(0, 0.0, error="HTTP 500")]), parse_constraints("e2e_max < 1s"))
    assert point.ttft_s == point.itl_s == point.e2e_s == NOTHING
    assert (point.window_s, point.output_tokens_per_s, point.goodput_rps) == (None, None, None)
    assert point.attainment == 0.0
    assert point.constraints == {"e2e_max < 1s": None}


def test_no_requests_and_no_constraints() -> None:
    point = measure(log_of([]))
    assert (point.attainment, point.goodput_rps, point.window_s, point.valid) == (None, None, None, False)
    assert measure(log_of([steady(0, 0.0)])).attainment_interval is None


def test_interrupted_requests_that_were_never_sent_do_not_count_as_missed() -> None:
    records = [steady(0, 0.0), RequestRecord(1, 60.0, error="not sent before the log breaks off")]
    point = measure(log_of(records, interrupted=True), parse_constraints("ttft_max < 1s"))
    assert point.attainment == 1.0
    assert (point.requests.sent, point.requests.failed, point.valid) == (1, 1, False)


def test_gaps_only_where_the_tokens_of_deltas_are_known() -> None:
    bundled = reply(0, 0.0, [(0.1, 1), (0.2, 1), (0.3, 6)], counted=False)
    single = reply(1, 0.0, [(0.1, 1), (0.2, 1)], counted=False)
    assert measure(log_of([bundled])).itl_s == NOTHING
    assert measure(log_of([bundled])).tpot_s.mean == pytest.approx(0.2 / 7)
    assert measure(log_of([bundled, single])).itl_s.max == pytest.approx(0.1)


def test_itl_of_a_request_is_the_statistic_of_its_own_gaps() -> None:
    smooth = reply(0, 0.0, [(0.1 * place, 1) for place in range(1, 11)])
    stalled = reply(1, 0.0, [(0.1, 1), (0.2, 1), (1.2, 1), (1.3, 1)])  # gaps 0.1, 1.0, 0.1: mean 0.4, p50 0.1
    log = log_of([smooth, stalled])
    for constraint, share in (("itl_mean < 0.3s", 0.5), ("itl_p50 < 0.3s", 1.0), ("itl_max < 1.1s", 1.0)):
        assert measure(log, parse_constraints(constraint)).attainment == share


def test_random_log_against_plain_python() -> None:
    draw = random.Random(7)
    records = []
    for id in range(400):
        time = due = id * 0.05
        deltas = []
        for _ in range(draw.randint(1, 20)):
            time += draw.expovariate(10)
            deltas.append((time, draw.randint(1, 3)))
        records.append(reply(id, due, deltas, error="cut" if draw.random() < 0.05 else None))
    point = measure(log_of(records), parse_constraints("ttft_p90 < 200ms, itl_mean < 100ms"))

    def line(values: list[float], share: float) -> float:
        values = sorted(values)
        place = share * (len(values) - 1)
        low = math.floor(place)
        return values[low] + (place - low) * (values[min(low + 1, len(values) - 1)] - values[low])

    done = [record for record in records if record.error is None]
    gaps = {
        record.id: [
            (later - earlier) / count
            for (earlier, _), (later, count) in zip(record.deltas, record.deltas[1:], strict=False)
            for _ in range(count)
        ]
        for record in done
    }
    every = [gap for values in gaps.values() for gap in values]
    ttft = [record.deltas[0][0] - record.due for record in done]
    for found, values in ((point.ttft_s, ttft), (point.itl_s, every)):
        assert found.mean == pytest.approx(sum(values) / len(values))
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99), ("max", 1.0)):
            assert getattr(found, name) == pytest.approx(line(values, share))
    kept = [
        record.deltas[0][0] - record.due < 0.2
        and len(gaps[record.id]) > 0
        and sum(gaps[record.id]) / len(gaps[record.id]) < 0.1
        for record in done
    ]
    assert point.attainment == pytest.approx(sum(kept) / 400)
    assert point.attainment_interval is not None
    assert point.attainment_interval[0] < point.attainment < point.attainment_interval[1]
    low, high = point.intervals["ttft_s.mean"]
    assert low < point.ttft_s.mean < high
    assert "itl_s.p90" in point.intervals


def test_facts_of_the_stage_are_carried_over() -> None:
    log = log_of([steady(0, 0.0)], load={"kind": "concurrency", "batch": 4}, batch=4)
    point = measure(replace(log, client={"workers": 2}))
    assert (point.name, point.target, point.batch, point.batch_kind) == ("stage", "engine", 4, "client")
    assert point.client == {"workers": 2}
    assert point.offered_rate is point.achieved_rate is None
