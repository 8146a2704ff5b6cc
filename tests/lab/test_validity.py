"""Every check finds its fault, and nothing in a stage without one."""

import math
import random
from dataclasses import replace
from itertools import accumulate

import pytest
from made_replies import log_of, open_loop, reply, steady
from scripted_server import CHUNKED, END, chunk, event, token, usage_chunk

from paceline.lab.client.log import StageLog
from paceline.lab.client.reply_parser import ReplyParser
from paceline.lab.measure import measure
from paceline.lab.record import RequestRecord
from paceline.lab.slo import parse_constraints
from paceline.lab.stage import PlannedRequest


def reasons(log: StageLog, slo: str = "") -> list[str]:
    return [text.split(":")[0] for text in measure(log, parse_constraints(slo)).reasons]


def notes(log: StageLog, slo: str = "") -> list[str]:
    return [text.split(":")[0] for text in measure(log, parse_constraints(slo)).notes]


def changed(log: StageLog, **fields: object) -> StageLog:
    """The log with these fields in all records."""
    return replace(log, records=[replace(record, **fields) for record in log.records])


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    log = open_loop(300, 50.0)
    point = measure(log, parse_constraints("ttft_p99 < 1s, itl_p99 < 1s"))
    assert (point.valid, point.reasons, point.notes) == (True, [], [])
    assert point.achieved_rate == pytest.approx(50.0)


def test_failures() -> None:
    log = open_loop(200, 50.0)
    for id in range(2):
        log.records[id].error = "HTTP 503"
    assert reasons(log) == []
    assert notes(log) == ["failures"]
    log.records[2].error = "HTTP 503"
    assert reasons(log) == ["failures"]
    assert "failures: 3 of 200 requests failed" in measure(log).reasons


def test_interrupted_and_empty() -> None:
    assert reasons(replace(open_loop(20, 50.0), interrupted=True)) == ["interrupted"]
    assert reasons(log_of([])) == ["empty"]
    assert "empty" in reasons(log_of([steady(0, 0.0, error="refused")]))


def test_clock() -> None:
    """failure 98"""
    log = open_loop(20, 50.0)
    log.records[3].sent = log.records[3].deltas[0][0] + 5.0
    assert "clock" in reasons(replace(log, client={}))
    log = open_loop(20, 50.0)
    log.records[3].deltas.reverse()
    assert reasons(log) == ["clock"]
    assert log.records[3].tpot is None


def test_rate_below_the_schedule() -> None:
    """failure 91: sleeps that add up, 183.5 requests/s at a target of 200."""
    log = open_loop(400, 200.0)
    drifting = [replace(record, sent=record.due * 200 / 183.5) for record in log.records]
    point = measure(replace(log, records=drifting))
    assert point.achieved_rate == pytest.approx(183.5)
    assert "rate: 183.5 requests/s were sent where the schedule has 200" in point.reasons
    steadily_late = [replace(record, sent=record.due + 0.0005) for record in log.records]
    assert reasons(replace(log, records=steadily_late)) == []


def test_schedule_that_is_not_what_was_offered() -> None:
    """A Poisson schedule may miss its rate by chance, a constant one may not."""
    draw = random.Random(3)
    due, records = 0.0, []
    for id in range(200):
        records.append(steady(id, due, ttft=0.01, tpot=0.001))
        due += draw.expovariate(50.0)
    span = records[-1].due
    offered = 1.1 * 199 / span
    for kind, found in (("poisson", []), ("constant", ["rate"]), ("trace", [])):
        assert reasons(log_of(records, load={"kind": kind}, offered_rate=offered)) == found
    assert reasons(log_of(records, load={"kind": "poisson"}, offered_rate=1.5 * 199 / span)) == ["rate"]
    assert reasons(log_of(records, load={"kind": "gamma", "cv": 3.0}, offered_rate=1.5 * 199 / span)) == []


def test_turns_are_not_of_the_schedule() -> None:
    records = [steady(id, 0.02 * id) for id in range(100)] + [steady(100 + id, 30.0 + id) for id in range(10)]
    planned = [PlannedRequest(r.id, r.due, [], 8, after=r.id - 100 if r.id >= 100 else None) for r in records]
    log = log_of(records, load={"kind": "constant", "rate": 50.0}, offered_rate=50.0, requests=planned)
    point = measure(log)
    assert (point.achieved_rate, point.reasons) == (pytest.approx(50.0), [])


def test_lateness() -> None:
    log = open_loop(200, 50.0)  # TTFT 100 ms
    late = replace(log, records=[replace(record, sent=record.due + 0.003) for record in log.records])
    assert reasons(late) == ["lateness"]
    assert "3 ms late on average, more than 2% of the TTFT (100 ms)" in measure(late).reasons[0]
    assert reasons(replace(late, client={})) == []  # an engine in this process has no client
    burst = [replace(record, sent=record.due + 0.02 * (record.id < 4)) for record in log.records]
    assert [text for text in measure(replace(log, records=burst)).reasons if "p99" in text]


def test_loop_delay() -> None:
    log = open_loop(300, 50.0, tpot=0.02)
    assert reasons(replace(log, client={"loop_delay_p99_s": 0.0049})) == []
    assert reasons(replace(log, client={"loop_delay_p99_s": 0.0051})) == ["loop"]
    assert reasons(replace(log, client={"loop_delay_p99_s": 0.0049}), "itl_p99 < 1s") == ["loop"]
    assert reasons(replace(open_loop(300, 50.0, ttft=0.003), client={"loop_delay_p99_s": 0.0009})) == []
    assert reasons(replace(log, client={"loop_delay_p99_s": 0.001, "loop_delay_p999_s": 0.0049})) == []
    assert reasons(replace(log, client={"loop_delay_p99_s": 0.001, "loop_delay_p999_s": 0.0051})) == ["loop"]


def test_busy_client_is_noted() -> None:
    log = replace(open_loop(200, 50.0), client={"cpu": 0.97})
    assert (reasons(log), notes(log)) == ([], ["cpu"])


def test_token_counts() -> None:
    log = open_loop(200, 50.0)
    assert reasons(changed(log, expected_tokens=9)) == ["length"]
    assert reasons(changed(log, expected_tokens=None)) == []
    assert reasons(changed(log, output_tokens=None)) == ["usage"]
    assert reasons(changed(log, output_tokens=9, expected_tokens=9)) == ["tokens", "tokens"]  # eight were asked for
    few = replace(log, records=[replace(r, expected_tokens=9) if r.id < 2 else r for r in log.records])
    assert (reasons(few), notes(few)) == ([], ["length"])
    assert "(200 of 200 replies)" in measure(changed(log, expected_tokens=9)).reasons[0]


def test_chunks_are_not_tokens() -> None:
    records = [reply(id, 0.02 * id, [(0.02 * id + 0.1, 1), (0.02 * id + 0.2, 7)], counted=False) for id in range(300)]
    log = log_of(records, load={"kind": "constant"}, offered_rate=50.0)
    assert (reasons(log), notes(log)) == ([], ["itl"])
    assert "itl" in reasons(log, "itl_p50 < 1s")


def test_a_server_that_refuses_ignore_eos_is_named_and_its_lengths_are_checked() -> None:
    log = replace(open_loop(200, 50.0), options={"usage": "final", "ignore_eos": False})
    assert (reasons(log), notes(log)) == ([], ["ignore_eos"])
    assert reasons(changed(log, expected_tokens=9)) == ["length"]
    by_choice = replace(log, stage=replace(log.stage, ignore_eos=False))
    assert notes(changed(by_choice, expected_tokens=None)) == []


@pytest.mark.parametrize("usage", [0, 4, 7, 9, 8000])
def test_impossible_usage(usage: int) -> None:
    """Of replies with eight deltas of text, which may end when they like and have at most eight tokens."""
    log = open_loop(200, 50.0)
    parts = [token(finish="length" if place == 7 else None) for place in range(8)]
    for place, record in enumerate(log.records):
        parser = ReplyParser(RequestRecord(record.id, record.due, sent=record.due))
        for step, part in enumerate(
            [CHUNKED, *(chunk(event(part)) for part in [*parts, usage_chunk(usage), "[DONE]"])]
        ):
            parser.feed(record.due + 0.1 + 0.01 * step, part)
        parser.feed(record.due + 0.21, END)
        log.records[place] = parser.finish()
    assert reasons(log) == ["tokens"]
    assert ("itl" in notes(log)) is (usage > 8)


@pytest.mark.parametrize(("usage", "words"), [("8", '"8"'), (True, "true"), (8.0, "8.0"), (-8, "-8")])
def test_usage_that_is_no_count(usage: object, words: str) -> None:
    """The replies are complete; how many tokens they have nobody knows. One of them changes no other figure."""

    def answered(log: StageLog, wrong: int) -> StageLog:
        for place, record in enumerate(log.records[:wrong]):
            parser = ReplyParser(RequestRecord(record.id, record.due, sent=record.sent, expected_tokens=8))
            last = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": usage, "total_tokens": 13}}
            for step, part in enumerate([*[token()] * 8, last, "[DONE]"]):
                parser.feed(record.due + 0.1 + 0.01 * step, (b"" if step else CHUNKED) + chunk(event(part)))
            parser.feed(record.due + 0.2, END)
            log.records[place] = parser.finish()
        return log

    point = measure(answered(open_loop(200, 50.0), 200))
    assert point.requests.failed == 0
    assert point.reasons == [
        f"usage: the server's completion_tokens, such as {words}, are no number of tokens (200 of 200 replies)"
    ]
    assert (point.output_tokens, point.tpot_s.mean, point.ttft_s.p50) == (0, None, pytest.approx(0.1))
    few = measure(answered(open_loop(200, 50.0), 1))
    assert (few.valid, [note.partition(":")[0] for note in few.notes]) == (True, ["usage"])
    assert few.output_tokens == 199 * 8


def test_more_deltas_than_tokens() -> None:
    record = reply(0, 0.0, [(0.1, 1), (0.2, 1), (0.3, 1)], counted=False, output_tokens=2, expected_tokens=2)
    point = measure(log_of([record]))
    assert [text.split(":")[0] for text in point.reasons] == ["tokens"]
    assert point.notes == []


def test_replies_without_tpot_cannot_keep_a_limit_of_it() -> None:
    """public failure 98: half of the replies are written at once, and only the others would be judged."""
    log = open_loop(600, 50.0)
    for id in range(0, 600, 2):
        log.records[id] = reply(id, id / 50, [(id / 50 + 0.2, 1)] * 8)
    assert reasons(log, "tpot_p99 < 40ms") == ["tpot"]
    assert reasons(log, "ttft_p99 < 1s") == []
    few = open_loop(600, 50.0)
    few.records[0] = reply(0, 0.0, [(0.2, 1)] * 8)
    few.records[1] = reply(1, 0.02, [(0.2, 1)])
    assert (reasons(few, "tpot_p99 < 40ms"), notes(few, "tpot_p99 < 40ms")) == ([], ["tpot", "tpot"])


def test_prompt_tokens_that_were_not_planned_are_noted() -> None:
    log = changed(open_loop(20, 50.0), prompt_tokens=100)
    planned = [replace(request, prompt_tokens=128) for request in log.stage.requests]
    assert "prompt" in notes(replace(log, stage=replace(log.stage, requests=planned)))


def test_too_few_for_the_percentile() -> None:
    point = measure(open_loop(50, 50.0), parse_constraints("ttft_p99 < 1s"))
    assert point.reasons == ["sample: ttft_p99 needs 299 values, there are 50"]
    assert reasons(open_loop(50, 50.0), "ttft_p90 < 1s, ttft_mean < 1s") == []
    assert reasons(open_loop(299, 50.0), "ttft_p99 < 1s") == []


def served(dues: list[float], service_s: float) -> list[RequestRecord]:
    """By a server that serves one at a time."""
    records: list[RequestRecord] = []
    free = 0.0
    for id, due in enumerate(dues):
        free = max(free, due) + service_s
        records.append(reply(id, due, [(free - service_s / 2, 1), (free, 1)]))
    return records


def queue(count: int, rate: float, service_s: float, seed: int) -> StageLog:
    """Poisson arrivals at one server."""
    draw = random.Random(seed)
    dues = list(accumulate(draw.expovariate(rate) for _ in range(count)))
    return log_of(served(dues, service_s), load={"kind": "poisson", "rate": rate}, offered_rate=rate)


@pytest.mark.parametrize("seed", range(8))
def test_saturated(seed: int) -> None:
    assert "saturated" in notes(queue(512, 10.0, 0.15, seed))
    assert "saturated" in notes(queue(512, 10.0, 0.12, seed))
    assert "saturated" not in notes(queue(512, 10.0, 0.08, seed))


def test_saturated_by_a_little() -> None:
    """Five percent more than a server can take are seen in most stages, and five percent less in few."""
    above, below = ([queue(512, rate, 0.02, seed) for seed in range(30)] for rate in (52.5, 47.5))
    assert sum("saturated" in notes(log) for log in above) >= 15
    assert sum("saturated" in notes(log) for log in below) <= 3


@pytest.mark.parametrize(("rate", "found"), [(52.5, True), (49.0, False)])
def test_saturated_at_equal_distances(rate: float, found: bool) -> None:
    """Where no chance is in the arrivals the smallest overload shows, however short the stage."""
    for count in (100, 512):
        records = served([id / rate for id in range(count)], 0.02)
        log = log_of(records, load={"kind": "constant", "rate": rate}, offered_rate=rate)
        assert ("saturated" in notes(log)) is found


def test_a_server_that_answers_two_thirds_of_what_comes_is_saturated() -> None:
    for seed in range(8):
        assert "saturated" in notes(queue(100, 25.0, 0.06, seed))


@pytest.mark.parametrize("kind", ["ramp", "trace"])
def test_ramps_and_traces_can_be_saturated(kind: str) -> None:
    """Requests/s grow to twice what the server can take, or to half of it."""
    for gap, found in ((0.0005, True), (0.002, False)):
        dues = [math.sqrt(2 * gap * id) for id in range(600)]
        service_s = dues[-1] / 600 if found else dues[-1] / 1200
        log = log_of(served(dues, service_s), load={"kind": kind}, offered_rate=600 / dues[-1])
        assert ("saturated" in notes(log)) is found


def test_a_stall_of_some_is_not_saturation() -> None:
    """A third of the last quarter is served as before, give or take a tenth of a millisecond."""
    records = [steady(id, id / 150, ttft=0.19) for id in range(225)]
    records += [steady(id, id / 150, ttft=0.1901 if id < 250 else 0.5) for id in range(225, 300)]
    log = log_of(records, load={"kind": "poisson", "rate": 150.0}, offered_rate=150.0)
    assert "saturated" not in notes(log)


def test_many_long_requests_at_once_are_not_saturated() -> None:
    """Each takes two seconds whatever else is served: more and more are in flight only at first."""
    for seed in range(8):
        draw = random.Random(seed)
        dues = list(accumulate(draw.expovariate(50.0) for _ in range(512)))
        records = [steady(id, due, ttft=0.1, tpot=2 * draw.expovariate(1.0) / 7) for id, due in enumerate(dues)]
        log = log_of(records, load={"kind": "poisson", "rate": 50.0}, offered_rate=50.0)
        assert "saturated" not in notes(log)


def test_stage_too_short_for_a_steady_state() -> None:
    assert notes(open_loop(50, 50.0, ttft=2.0)) == ["steady"]
    records = [steady(id, 0.0) for id in range(20)]
    assert notes(log_of(records, load={"kind": "concurrency"}, batch=8)) == ["steady"]
    assert notes(log_of(records, load={"kind": "concurrency"}, batch=5)) == []


def test_slow_start() -> None:
    log = open_loop(100, 50.0)
    slow = [steady(id, record.due, ttft=0.5) if id < 5 else record for id, record in enumerate(log.records)]
    assert "warmup" in notes(replace(log, records=slow))
