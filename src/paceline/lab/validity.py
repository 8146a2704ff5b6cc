"""Whether a point may be believed: the checks of its client, its load and its token counts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import numpy as np

from paceline.lab.client.log import StageLog
from paceline.lab.gaps import count_known
from paceline.lab.point import Counts
from paceline.lab.record import RequestRecord
from paceline.lab.slo import Constraint
from paceline.lab.statistics import PERCENTILES, Floats, Sample, requests_needed


@dataclass(frozen=True, slots=True)
class Limits:
    """Beyond which a point is not valid."""

    rate: float = 0.01
    """Share by which the requests sent a second may miss the schedule: a load 1% off moves the knee of a latency curve
    by as much, which is less than a search resolves."""
    lateness: float = 0.02
    """Mean lateness of sending as a share of the mean TTFT, which is counted from the scheduled send and so is wrong by
    the lateness."""
    lateness_p99: float = 0.05
    """The same of the 99th percentiles, which vary more between runs anyway."""
    loop_delay: float = 0.05
    """99th percentile of the client's loop delay, as a share of the median TTFT (and of the median gap where a
    constraint is about gaps): a token may have lain in the socket for as long before it was seen. And its 99.9th as a
    share of the 99th percentile of TTFT, which a few stalls shift."""
    floor_s: float = 0.001
    """Lateness and loop delay below it are never held against a point: no user feels a millisecond."""
    rare_floor_s: float = 0.005
    """The same of the loop's delay at its 99.9th percentile, which moves a p99 by a part of itself only."""
    failures: float = 0.01
    """Share of the planned requests: with more of them a p99 that took failures as endless would have no value."""
    counts: float = 0.01
    """Share of the completed requests whose lengths or token counts disagree: throughput and TPOT are off by at most
    that much where each of them is off by all of its tokens."""
    clock_s: float = 0.0001
    """Events of one request may be out of order by as much: two readings of one clock."""


@dataclass(frozen=True, slots=True)
class Findings:
    reasons: list[str] = field(default_factory=list)
    """Why the point is not valid."""
    notes: list[str] = field(default_factory=list)
    """What does not make it invalid but must be known."""


def check(
    log: StageLog,
    counts: Counts,
    samples: dict[str, Sample],
    constraints: Sequence[Constraint] = (),
    limits: Limits | None = None,
) -> Findings:
    """Makes all checks. Each finding starts with the name of its check and a colon.

    ``samples`` has the measured values of each metric of `slo.METRICS`.
    """
    limits = limits or Limits()
    found = Findings()
    if log.interrupted:
        found.reasons.append("interrupted: the stage was stopped before its end")
    if counts.ok == 0:
        found.reasons.append("empty: no request was completed")
    _check_failures(counts, limits, found)
    _check_clock(log.records, limits, found)
    _check_rate(log, limits, found)
    if log.client:
        _check_lateness(log.records, samples, limits, found)
        _check_loop(log.client, samples, constraints, limits, found)
    _check_tokens(log, constraints, limits, found)
    _check_samples(samples, constraints, found)
    _check_saturated(log, found)
    _check_steady(log, found)
    return found


def achieved_rate(log: StageLog) -> float | None:
    """Requests sent a second, from the first scheduled send to the last send; None where no rate was offered.

    A request counts from when the client turned to it: what a server takes to accept a connection is not the client's.

    Requests that wait for others are left out: their time is not the schedule's.
    """
    times = [(record.due, record.begun) for record in _scheduled(log) if record.begun is not None]
    if log.stage.offered_rate is None or len(times) < 2:
        return None
    span = max(begun for _, begun in times) - min(due for due, _ in times)
    return (len(times) - 1) / span if span > 0 else None


def _scheduled(log: StageLog) -> list[RequestRecord]:
    waiting = {request.id for request in log.stage.requests if request.after is not None}
    return [record for record in log.records if record.id not in waiting]


def _variation(log: StageLog) -> float | None:
    """Coefficient of variation of the gaps between arrivals; None for loads that are not stationary."""
    kind = log.stage.load.get("kind")
    if log.stage.offered_rate is None or kind not in ("constant", "poisson", "gamma"):
        return None
    return {"constant": 0.0, "poisson": 1.0}.get(kind, float(log.stage.load.get("cv", 1.0)))


def _check_failures(counts: Counts, limits: Limits, found: Findings) -> None:
    planned = counts.ok + counts.failed
    if counts.failed:
        text = f"failures: {counts.failed} of {planned} requests failed"
        invalid = counts.failed > limits.failures * planned
        (found.reasons if invalid else found.notes).append(text)


def _check_clock(records: Sequence[RequestRecord], limits: Limits, found: Findings) -> None:
    def backwards(record: RequestRecord) -> bool:
        times = [record.connecting, record.sent, record.headers, record.first, record.last, record.ended]
        known = [time for time in times if time is not None]
        return any(later < earlier - limits.clock_s for earlier, later in pairwise(known))

    if wrong := sum(map(backwards, records)):
        found.reasons.append(f"clock: the times of {wrong} requests run backwards")


def _check_rate(log: StageLog, limits: Limits, found: Findings) -> None:
    achieved, offered, scheduled = achieved_rate(log), log.stage.offered_rate, _scheduled(log)
    if achieved is None or offered is None:
        return
    span = max(record.due for record in scheduled) - min(record.due for record in scheduled)
    if span <= 0:
        return
    planned = (len(scheduled) - 1) / span
    if achieved < planned * (1 - limits.rate):
        found.reasons.append(f"rate: {achieved:.4g} requests/s were sent where the schedule has {planned:.4g}")
    variation = _variation(log)
    if variation is not None and abs(planned / offered - 1) > limits.rate + 3 * variation / math.sqrt(len(scheduled)):
        found.reasons.append(f"rate: the schedule has {planned:.4g} requests/s where {offered:.4g} were offered")


def _check_lateness(
    records: Sequence[RequestRecord], samples: dict[str, Sample], limits: Limits, found: Findings
) -> None:
    late = np.array([record.begun - record.due for record in records if record.begun is not None])
    ttft = samples["ttft"].values
    if late.size == 0 or ttft.size == 0:
        return
    for name, value, whole, share in (
        ("on average", late.mean(), ttft.mean(), limits.lateness),
        ("at p99", np.percentile(late, 99), np.percentile(ttft, 99), limits.lateness_p99),
    ):
        if value > max(limits.floor_s, share * whole):
            found.reasons.append(
                f"lateness: requests were sent {_ms(value)} late {name}, more than {share:.0%} of the TTFT "
                f"({_ms(whole)})"
            )


def _check_loop(
    client: dict[str, float],
    samples: dict[str, Sample],
    constraints: Sequence[Constraint],
    limits: Limits,
    found: Findings,
) -> None:
    delay = client.get("loop_delay_p99_s", 0.0)
    metrics = ["ttft"] + ["itl"] * any(constraint.metric == "itl" for constraint in constraints)
    for metric in metrics:
        if samples[metric].values.size == 0:
            continue
        middle = float(np.median(samples[metric].values))
        if delay > max(limits.floor_s, limits.loop_delay * middle):
            found.reasons.append(
                f"loop: the client saw its sockets {_ms(delay)} late at p99, more than {limits.loop_delay:.0%} of the "
                f"median {metric.upper()} ({_ms(middle)})"
            )
    stall, ttft = client.get("loop_delay_p999_s", 0.0), samples["ttft"].values
    if ttft.size and stall > max(limits.rare_floor_s, limits.loop_delay * float(np.percentile(ttft, 99))):
        found.reasons.append(
            f"loop: the client saw its sockets {_ms(stall)} late at p99.9, more than {limits.loop_delay:.0%} of the "
            f"TTFT at p99 ({_ms(np.percentile(ttft, 99))})"
        )
    if client.get("cpu", 0.0) > 0.9:
        found.notes.append(f"cpu: the client's busiest worker used {client['cpu']:.0%} of a core; give it more workers")


def _check_tokens(log: StageLog, constraints: Sequence[Constraint], limits: Limits, found: Findings) -> None:
    done = [record for record in log.records if record.ok]

    def count(wrong: Callable[[RequestRecord], bool], text: str, *, invalid: bool = True) -> None:
        number = sum(map(wrong, done))
        if number:
            invalid = invalid and number > limits.counts * len(done)
            (found.reasons if invalid else found.notes).append(f"{text} ({number} of {len(done)} replies)")

    asked = {request.id: request.output_tokens for request in log.stage.requests}
    if log.stage.ignore_eos and not log.options.get("ignore_eos", True):
        found.notes.append(
            "ignore_eos: the server refuses it, so replies may end before they have the tokens asked for"
        )
    count(
        lambda r: r.output_tokens is None and r.wrong_usage is None,
        "usage: the server does not say how many tokens it made",
    )
    wrong = next((record.wrong_usage for record in done if record.wrong_usage is not None), "")
    count(
        lambda r: r.wrong_usage is not None,
        f"usage: the server's completion_tokens, such as {wrong}, are no number of tokens",
    )
    count(
        lambda r: None not in (r.output_tokens, r.expected_tokens) and r.output_tokens != r.expected_tokens,
        "length: the number of tokens is not the one asked for",
    )
    count(
        lambda r: r.output_tokens is not None and sum(n for _, n in r.deltas) != r.output_tokens,
        "tokens: the deltas have another number of tokens than the server's usage",
    )
    count(
        lambda r: r.output_tokens is not None and r.output_tokens > asked.get(r.id, r.output_tokens),
        "tokens: the server's usage has more tokens than were asked for",
    )
    count(
        lambda r: r.output_tokens is not None and not count_known(r) and len(r.deltas) < r.output_tokens,
        "itl: the server does not say how many tokens a delta has, and the gaps are not measured",
        invalid=any(constraint.metric == "itl" for constraint in constraints),
    )
    if any(constraint.metric == "tpot" for constraint in constraints):
        count(
            lambda r: r.output_tokens is not None and r.output_tokens > 1 and r.tpot is None,
            "tpot: all tokens of a reply came at one time, and its TPOT is not measured",
        )
        count(
            lambda r: r.output_tokens == 1, "tpot: a reply of one token has no TPOT and keeps no limit", invalid=False
        )
    lengths = {request.id: request.prompt_tokens for request in log.stage.requests}
    count(
        lambda r: None not in (r.prompt_tokens, lengths.get(r.id)) and r.prompt_tokens != lengths[r.id],
        "prompt: the server counts another number of prompt tokens than was planned",
        invalid=False,
    )


def _check_samples(samples: dict[str, Sample], constraints: Sequence[Constraint], found: Findings) -> None:
    for constraint in constraints:
        share, count = PERCENTILES.get(constraint.statistic), samples[constraint.metric].values.size
        if share is not None and 0 < count < requests_needed(share):
            found.reasons.append(
                f"sample: {constraint.metric}_{constraint.statistic} needs {requests_needed(share)} values, "
                f"there are {count}"
            )


def _check_steady(log: StageLog, found: Findings) -> None:
    """Notes: a stage too short for a steady state, a slow start."""
    if log.stage.load.get("kind") == "concurrency" and log.stage.batch and len(log.records) < 4 * log.stage.batch:
        found.notes.append(f"steady: {len(log.records)} requests are fewer than four rounds of {log.stage.batch}")
    sent = sorted((record for record in log.records if record.sent is not None), key=lambda record: record.due)
    durations = [record.e2e for record in sent if record.e2e is not None]
    if _variation(log) is None or len(sent) < 8 or not durations:
        return
    start, end = sent[0].due, sent[-1].due
    if end - start < 2 * median(durations):
        found.notes.append(
            f"steady: arrivals lasted {end - start:.3g} s and a request takes {median(durations):.3g} s (p50); "
            "a longer stage may be slower"
        )
        return
    few = max(5, len(sent) // 20)
    early = [record.ttft for record in sent[:few] if record.ttft is not None]
    later = [record.ttft for record in sent[few:] if record.ttft is not None]
    if len(sent) >= 40 and early and later and median(early) > 2 * median(later) + 0.01:
        found.notes.append(
            f"warmup: the first {few} requests had a median TTFT of {_ms(median(early))}, "
            f"the others of {_ms(median(later))}"
        )


def _check_saturated(log: StageLog, found: Findings) -> None:
    """Note: an engine that falls behind. Answers came slower than requests over the second half of the arrivals, and
    the latency in the last quarter of the requests is surely more than in the second.

    A steady load is held against the rate that was offered, not against what came by chance: what a full engine answers
    has none of the arrivals' noise. Where there is no such rate, as in a trace, against what came.
    """
    if log.stage.load.get("kind") in ("burst", "concurrency"):
        return
    sent = sorted((record for record in log.records if record.begun is not None), key=lambda record: record.due)
    durations = [record.e2e for record in sent if record.e2e is not None]
    if len(sent) < 32 or not durations:
        return
    start, end = sent[0].due, sent[-1].due
    if end - start < 2 * median(durations[: max(5, len(durations) // 10)]):
        return  # The first ones were answered into its second half: that half is no steady state.
    middle = (start + end) / 2
    came = float(sum(record.due > middle for record in sent))
    enough = 0.95
    if _variation(log) is not None and log.stage.offered_rate is not None:
        came, enough = log.stage.offered_rate * (end - middle), 0.99
    answered = sum(record.ended is not None and middle < record.ended <= end for record in sent)
    if answered >= enough * came:
        return
    for metric in ("ttft", "e2e"):
        early, late = (_of_quarter(sent, quarter, metric) for quarter in (1, 3))
        if min(early.size, late.size) < 2:
            continue
        growth = late.mean() - early.mean()
        error = math.hypot(*(values.std(ddof=1) / math.sqrt(values.size) for values in (early, late)))
        # All but a few: a stall that is over by the end is none of it.
        least = np.quantile(late, 0.1) - np.median(early)
        if growth > 3 * error and least > 0.005 * (end - start) / 2:
            found.notes.append(
                f"saturated: in the second half {answered} requests were answered while {came:.0f} were due, and the "
                f"mean {metric.upper()} grew from {_ms(early.mean())} to {_ms(late.mean())}; "
                "a longer stage would be slower"
            )
            return


def _of_quarter(sent: Sequence[RequestRecord], quarter: int, metric: str) -> Floats:
    """Measured values of a quarter (0 to 3) of the requests."""
    part = sent[quarter * len(sent) // 4 : (quarter + 1) * len(sent) // 4]
    values = [getattr(record, metric) for record in part]
    return np.array([value for value in values if value is not None], dtype=np.float64)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
