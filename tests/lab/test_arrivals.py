import math
from collections import Counter, defaultdict
from heapq import heappop, heappush

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.lab.stage import Stage
from paceline.lab.workload.arrivals import burst, closed_stage, constant, gamma, heads, open_stage, poisson, ramp
from paceline.lab.workload.draft import Draft
from paceline.lab.workload.invalid import InvalidWorkload

RATES = st.floats(0.01, 1e4)
SEEDS = st.integers(0, 2**63)


def drafts(n: int, output: int = 8) -> list[Draft]:
    return [Draft([index], output, 1) for index in range(n)]


def test_burst_is_due_at_once() -> None:
    assert burst(3) == [0.0, 0.0, 0.0]


@settings(deadline=None)
@given(RATES, st.integers(0, 2000))
def test_constant_times_are_absolute(rate: float, n: int) -> None:
    """public failure 91: times that are sums of gaps drift; these are not, however many there are."""
    assert constant(n, rate) == [index / rate for index in range(n)]


@settings(deadline=None)
@given(RATES, SEEDS)
def test_poisson_has_its_rate(rate: float, seed: int) -> None:
    n = 4000
    due = poisson(n, rate, seed)
    assert due[0] == 0.0
    assert due == sorted(due)
    assert due[-1] * rate / (n - 1) == pytest.approx(1)
    # Half way the count is binomial: six standard deviations do not happen by chance.
    assert sum(time < due[-1] / 2 for time in due) == pytest.approx(n / 2, abs=6 * math.sqrt(n / 4))


def test_poisson_gaps_are_exponential_and_independent() -> None:
    n = 20_000
    gaps = np.diff(poisson(n, 5.0, seed=3))
    cumulative = 1 - np.exp(-5.0 * np.sort(gaps))
    distance = np.max(np.abs(cumulative - np.arange(1, n) / n))
    assert distance < 1.95 / math.sqrt(n)  # Kolmogorov-Smirnov, 0.1%
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 4 / math.sqrt(n)
    counts = Counter(int(time) for time in np.cumsum(gaps))
    per_second = [counts[second] for second in range(int(sum(gaps)))]
    assert np.var(per_second) / np.mean(per_second) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("cv", [0.1, 0.5, 1.0, 2.0, 5.0])
def test_gamma_has_its_rate_and_variation(cv: float) -> None:
    n = 200_000
    gaps = np.diff(gamma(n, 4.0, cv, seed=11))
    assert np.mean(gaps) == pytest.approx(0.25)
    skewness = np.mean((gaps / 0.25 - 1) ** 3) / np.std(gaps / 0.25) ** 3
    assert skewness == pytest.approx(2 * cv, rel=0.15)  # of a gamma distribution
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(cv, rel=0.05)


@settings(deadline=None)
@given(RATES, st.floats(0.1, 100), SEEDS)
def test_rates_share_one_pattern(rate: float, faster: float, seed: int) -> None:
    for arrivals in (lambda r: poisson(50, r, seed), lambda r: gamma(50, r, 2.0, seed)):
        for slow, fast in zip(arrivals(rate), arrivals(rate * faster), strict=True):
            assert slow == pytest.approx(fast * faster, rel=1e-9, abs=1e-8 * max(1, faster))


@settings(deadline=None)
@given(st.integers(1, 3000), st.floats(0.1, 1000), st.floats(0.1, 1000))
def test_ramp_counts(n: int, start_rate: float, end_rate: float) -> None:
    due = ramp(n, start_rate, end_rate)
    end = 2 * n / (start_rate + end_rate)
    assert due[0] == 0.0
    assert due == sorted(due)
    assert due[-1] < end
    for share in (0.1, 0.25, 0.5, 0.9):
        time = share * end
        area = start_rate * time + (end_rate - start_rate) * time**2 / (2 * end)  # the rate's integral
        assert abs(sum(t < time for t in due) - area) <= 1 + 1e-6 * n


def test_ramp_of_one_rate_is_constant() -> None:
    assert ramp(100, 8.0, 8.0) == pytest.approx(constant(100, 8.0))


def test_a_seed_gives_the_same_times_on_every_platform() -> None:
    assert poisson(4, 3.0, 7) == [0.0, 0.693401844, 0.975998912, 1.0]
    assert gamma(4, 3.0, 2.0, 7) == [0.0, 0.765906817, 0.765961179, 1.0]
    assert poisson(4, 3.0, 8) != poisson(4, 3.0, 7)


def test_a_variation_beyond_numbers() -> None:
    with pytest.raises(InvalidWorkload, match=r"^cv: is too large for 3 requests"):
        gamma(3, 1.0, 1e6)


@pytest.mark.parametrize("n", [0, 1])
def test_few_requests(n: int) -> None:
    for due in (burst(n), constant(n, 1.0), poisson(n, 1.0), gamma(n, 1.0, 2.0), ramp(n, 1.0, 2.0)):
        assert due == [0.0] * n


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_impossible_rates(rate: float) -> None:
    for make in (constant, poisson):
        with pytest.raises(InvalidWorkload, match=r"^rate: must be above 0"):
            make(3, rate)
    with pytest.raises(InvalidWorkload, match=r"^cv: must be above 0"):
        gamma(3, 1.0, rate)
    with pytest.raises(InvalidWorkload, match=r"^end_rate: must be above 0"):
        ramp(3, 1.0, rate)


def test_open_stage() -> None:
    turn = Draft("more", 5, after=0, delay_s=1.5, needs=True)
    load = {"kind": "constant", "rate": 2}
    stage = open_stage("s", [Draft("a", 4), turn, Draft([1, 2], 3, 2)], [0.0, 0.5], load, offered_rate=2, deadline_s=9)
    first, second, third = stage.requests
    assert (first.id, first.due, first.prompt, first.output_tokens, first.after) == (0, 0.0, "a", 4, None)
    assert (second.id, second.due, second.after, second.needs) == (1, 1.5, 0, True)
    assert (third.id, third.due, third.prompt_tokens, third.after, third.needs) == (2, 0.5, 2, None, False)
    assert (stage.offered_rate, stage.batch, stage.deadline_s, stage.load) == (2, None, 9, load)
    assert stage.ignore_eos
    assert stage.sampling == {"temperature": 0}


def test_stages_that_cannot_be() -> None:
    with pytest.raises(InvalidWorkload, match="2 times for 3 requests"):
        open_stage("s", drafts(3), [0.0, 1.0], {}, offered_rate=None, deadline_s=9)
    with pytest.raises(InvalidWorkload, match=r"^deadline_s: 2 s is over before the last request is due \(4 s\)"):
        open_stage("s", drafts(2), [0.0, 4.0], {}, offered_rate=None, deadline_s=2)
    with pytest.raises(InvalidWorkload, match="request 0 follows request 1"):
        open_stage("s", [Draft("b", 1, after=1), Draft("a", 1)], [0.0], {}, offered_rate=None, deadline_s=2)
    with pytest.raises(InvalidWorkload, match=r"^requests: there are none"):
        open_stage("s", [], [], {}, offered_rate=None, deadline_s=2)
    with pytest.raises(InvalidWorkload, match=r"^batch: must be at least 1"):
        closed_stage("s", drafts(3), 0, deadline_s=2)
    fork = [Draft("a", 1), Draft("b", 1, after=0), Draft("c", 1, after=0)]
    with pytest.raises(InvalidWorkload, match="two turns follow request 0"):
        closed_stage("s", fork, 2, deadline_s=2)


def in_flight(stage: Stage, service: list[float]) -> list[tuple[float, int]]:
    """(time, requests open from then on), by playing the stage on a server that takes the given time for each."""
    followers = defaultdict(list)
    events = [(request.due, 1, request.id) for request in stage.requests if request.after is None]
    for request in stage.requests:
        followers[request.after].append(request)
    events.sort()
    counts: dict[float, int] = {}
    now_open = 0
    while events:
        time, change, index = heappop(events)
        now_open += change
        counts[time] = now_open
        if change == 1:
            heappush(events, (time + service[index], -1, index))
        for follower in followers[index] if change == -1 else ():
            heappush(events, (time + follower.due, 1, follower.id))
    return sorted(counts.items())


@settings(deadline=None)
@given(st.data(), st.integers(1, 12), st.integers(1, 60))
def test_closed_stage_keeps_its_seats(data: st.DataObject, batch: int, n: int) -> None:
    outputs = data.draw(st.lists(st.integers(1, 100), min_size=n, max_size=n))
    service = [output * 0.01 for output in outputs]  # as long as they are: the load that the seats are given out for
    stage = closed_stage("s", [Draft([1], output, 1) for output in outputs], batch, deadline_s=9)
    assert (stage.batch, stage.offered_rate, stage.load) == (batch, None, {"kind": "concurrency", "batch": batch})
    seats = [request for request in stage.requests if request.after is None]
    assert [request.due for request in seats] == pytest.approx([0.0001 * place for place in range(len(seats))])
    assert all(request.due == 0 for request in stage.requests if request.after is not None)
    counts = in_flight(stage, service)
    assert max(count for _, count in counts) == min(batch, n)
    starts = {}
    for request in stage.requests:  # a request starts when the one that held its seat has ended
        ended = 0.0 if request.after is None else starts[request.after] + service[request.after]
        starts[request.id] = ended + request.due
    assert len(starts) == n
    last_start = max(starts.values())
    full = seats[-1].due
    assert all(count == min(batch, n) for time, count in counts if full <= time < last_start - 1e-9)


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 50))
def test_seats_of_equal_requests_are_taken_in_turns(batch: int, n: int) -> None:
    stage = closed_stage("s", drafts(n), batch, deadline_s=9)
    assert [request.after for request in stage.requests] == [i - batch if i >= batch else None for i in range(n)]


def test_a_session_keeps_its_seat() -> None:
    made = [Draft("a", 5), Draft("b", 50), Draft("a2", 5, after=0, delay_s=2.0, needs=True), Draft("c", 5)]
    stage = closed_stage("s", made, 2, deadline_s=9)
    assert [request.prompt for request in stage.requests] == ["a", "a2", "b", "c"]
    assert [request.id for request in stage.requests] == [0, 1, 2, 3]
    assert [request.after for request in stage.requests] == [None, 0, None, 1]
    assert [request.due for request in stage.requests] == [0.0, 2.0, 0.0001, 0.0]
    assert [request.needs for request in stage.requests] == [False, True, False, False]


def test_turns_of_other_sessions_lie_between() -> None:
    made = [Draft("a", 1), Draft("b", 1), Draft("a2", 1, after=0), Draft("b2", 1, after=1), Draft("a3", 1, after=2)]
    stage = closed_stage("s", made, 1, deadline_s=9)
    assert [request.prompt for request in stage.requests] == ["a", "a2", "a3", "b", "b2"]
    assert [request.after for request in stage.requests] == [None, 0, 1, 2, 3]


def test_heads_are_those_that_wait_for_no_other() -> None:
    made = [Draft("a", 5), Draft("b", 5, after=0), Draft("c", 5)]
    assert [draft.prompt for draft in heads(made)] == ["a", "c"]
