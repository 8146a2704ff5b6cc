"""From the log of a stage to its point: every figure by the definitions in ``docs/lab.md``."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from paceline.lab import statistics, validity
from paceline.lab.client.log import StageLog
from paceline.lab.gaps import gaps
from paceline.lab.point import Counts, Point
from paceline.lab.record import RequestRecord
from paceline.lab.slo import Constraint
from paceline.lab.statistics import (
    PERCENTILES,
    Floats,
    Interval,
    Ints,
    Sample,
    blocks_of,
    effective_requests,
    summarize,
    wilson,
)
from paceline.lab.throughput import Flow


def measure(log: StageLog, constraints: Sequence[Constraint] = ()) -> Point:
    """Measures a stage.

    Failed requests are in no latency and in no throughput, but count against goodput and attainment. A value that was
    not measured is None and keeps no constraint.
    """
    sent = sum(record.sent is not None for record in log.records)
    # What could not be sent was asked for all the same, but not what the user stopped.
    asked = [record for record in log.records if record.sent is not None or not log.interrupted]
    asked.sort(key=lambda record: (record.due, record.id))
    done = [record for record in asked if record.ok]
    blocks = blocks_of(len(asked))
    samples = _samples(asked, blocks)
    summary = {metric: summarize(sample.values) for metric, sample in samples.items()}
    planned = max(len(log.stage.requests), len(log.records))
    counts = Counts(sent=sent, ok=len(done), failed=planned - len(done))
    window = _window(asked, done)
    tokens = sum(record.output_tokens or 0 for record in done)
    kept, severity = _kept(asked, constraints)
    judged = bool(constraints) and bool(asked)
    share = float(kept.mean()) if judged else None
    worth = effective_requests(severity, kept, blocks) if judged else None
    found = validity.check(log, counts, samples, constraints)
    rates = {
        "output_tokens_per_s": _rate(tokens, window),
        "requests_per_s": _rate(len(done), window),
        "goodput_rps": _rate(int(kept.sum()), window) if judged else None,
    }
    return Point(
        name=log.stage.name,
        target=log.target.name,
        load=log.stage.load,
        offered_rate=log.stage.offered_rate,
        achieved_rate=validity.achieved_rate(log),
        batch=log.stage.batch,
        batch_kind="client" if log.stage.load.get("kind") == "concurrency" else None,
        valid=not found.reasons,
        reasons=found.reasons,
        notes=found.notes,
        requests=counts,
        errors=dict(Counter(record.error for record in log.records if record.error is not None)),
        ttft_s=summary["ttft"],
        ttft_from_send_s=summarize(_values(done, lambda record: record.ttft_from_send)),
        tpot_s=summary["tpot"],
        itl_s=summary["itl"],
        e2e_s=summary["e2e"],
        output_tokens=tokens,
        prompt_tokens=sum(record.prompt_tokens or 0 for record in done),
        window_s=window,
        output_tokens_per_s=rates["output_tokens_per_s"],
        requests_per_s=rates["requests_per_s"],
        goodput_rps=rates["goodput_rps"],
        attainment=share,
        attainment_interval=None if share is None or worth is None else wilson(share, worth),
        effective_requests=worth,
        constraints={item.text: _keeps(item, asked, samples[item.metric].values) for item in constraints},
        intervals={
            f"{metric}_s.{name}": interval
            for metric, sample in samples.items()
            for name, interval in statistics.intervals(sample).items()
        }
        | _rate_intervals(log, asked, kept, window, rates),
        client=dict(log.client),
    )


def _rate_intervals(
    log: StageLog,
    asked: Sequence[RequestRecord],
    kept: npt.NDArray[np.bool_],
    window: float | None,
    rates: dict[str, float | None],
) -> dict[str, Interval]:
    """Of the rates that have one."""
    done = [(record, good) for record, good in zip(asked, kept.tolist(), strict=True) if record.ok and record.deltas]
    if window is None or not done:
        return {}
    # A seat of a closed loop is busy from the send on. Elsewhere a request may wait while others are served.
    closed = log.stage.load.get("kind") == "concurrency"
    begins = [record.sent if closed else record.first for record, _ in done]
    flow = Flow(
        begin=np.array(begins, dtype=np.float64),
        end=np.array([record.last for record, _ in done], dtype=np.float64),
        due=None if log.stage.offered_rate is None else np.array([record.due for record, _ in done]),
        window_s=window,
    )
    weights = {
        "output_tokens_per_s": np.array([float(record.output_tokens or 0) for record, _ in done]),
        "requests_per_s": np.ones(len(done)),
        "goodput_rps": np.array([float(good) for _, good in done]),
    }
    found = {}
    for name, rate in rates.items():
        if rate and (error := flow.error(weights[name])) is not None:
            found[name] = (rate * math.exp(-error), rate * math.exp(error))
    return found


def _keeps(constraint: Constraint, asked: Sequence[RequestRecord], values: Floats) -> bool | None:
    """Whether the stage keeps a constraint; None where nothing was measured.

    The statistic of the completed requests must be within the limit. That of a percentile is a promise to a share of
    all requests (to all of them, of ``max``): those that failed or were not measured did not keep it.
    """
    found = constraint.keeps(constraint.value_of(summarize(values)))
    promised = {**PERCENTILES, "max": 1.0}.get(constraint.statistic)
    if not found or promised is None:
        return found
    if constraint.metric == "itl":  # Of its many values a failed request would have as many as others.
        share = constraint.share_of(values) * sum(record.ok for record in asked) / len(asked)
    else:
        # A reply of one token has no TPOT by nature.
        judged = [r for r in asked if not (constraint.metric == "tpot" and r.ok and r.output_tokens == 1)]
        share = sum(constraint.keeps(constraint.of(record)) is True for record in judged) / len(judged)
    return share >= promised - 1e-9  # A quotient of counts.


def _kept(asked: Sequence[RequestRecord], constraints: Sequence[Constraint]) -> tuple[npt.NDArray[np.bool_], Floats]:
    """Of each request, whether it kept every constraint, and the most it took of a limit."""
    kept, severity = np.ones(len(asked), dtype=np.bool_), np.zeros(len(asked))
    for constraint in constraints:
        values = [constraint.of(record) for record in asked]
        kept &= np.array([constraint.keeps(value) is True for value in values], dtype=np.bool_)
        taken = [np.inf if value is None else value / constraint.limit_s for value in values]
        severity = np.maximum(severity, np.array(taken))
    return kept, severity


def _samples(asked: Sequence[RequestRecord], blocks: Ints) -> dict[str, Sample]:
    """The measured values of each metric of `slo.METRICS`."""
    samples = {}
    for metric in ("ttft", "tpot", "e2e"):
        values: list[float | None] = [getattr(record, metric) for record in asked]
        known = np.array([value is not None for value in values], dtype=np.bool_)
        samples[metric] = Sample(np.array([value for value in values if value is not None]), blocks[known])
    of_each = [gaps(record) for record in asked]
    lengths = [len(values) for values in of_each]
    samples["itl"] = Sample(np.concatenate(of_each) if of_each else np.empty(0), np.repeat(blocks, lengths))
    return samples


def _values(records: Iterable[RequestRecord], value: Callable[[RequestRecord], float | None]) -> Floats:
    return np.array([found for record in records if (found := value(record)) is not None], dtype=np.float64)


def _window(asked: Sequence[RequestRecord], done: Sequence[RequestRecord]) -> float | None:
    """Seconds from the first scheduled send to the last token of a completed reply; None where nothing was completed.

    What comes after its last token is no part of the work: a server may keep a finished body open.
    """
    ends = [end for record in done if (end := record.last if record.last is not None else record.ended) is not None]
    return max(ends) - asked[0].due if ends else None


def _rate(count: int, window: float | None) -> float | None:
    """A second; None for no time, and 0.0 where there was time and nothing came of it."""
    return None if window is None or window <= 0 else count / window
