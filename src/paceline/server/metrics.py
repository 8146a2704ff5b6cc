"""Prometheus metrics. Nothing here can fail a request: errors are logged and the sample is lost.

The values lie on a `Board`, so that a scrape of any process tells of the whole server. Samples are taken for every
token, so taking one is a few additions; what Prometheus wants to see is made when it asks.
"""

import functools
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from paceline.engine.output import Delta
from paceline.engine.request import CoreStats
from paceline.server.board import Board

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., None])

TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 40, 80, 160)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1, 2.5)
E2E_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 45, 60, 120, 240, 480, 960)


def never_raises(method: F) -> F:
    @functools.wraps(method)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            method(*args, **kwargs)
        except Exception:
            log.exception("metrics: a sample is lost")

    return guarded  # type: ignore[return-value]


@dataclass(frozen=True)
class Series:
    """What a metric is, and where its values lie on a row: one value, one for each label, or for a histogram the sum
    and then the count of each bucket."""

    name: str
    help: str
    kind: Literal["counter", "gauge", "histogram"]
    label: str = ""
    labels: tuple[str, ...] = ("",)
    buckets: tuple[float, ...] = ()
    engine: str = ""
    """The field of `CoreStats` behind it: every process knows the same one value, sooner or later."""

    @property
    def width(self) -> int:
        return 2 + len(self.buckets) if self.kind == "histogram" else len(self.labels)

    def family(self, rows: "list[memoryview[float]]", at: int) -> Metric:
        """The values of all processes as one metric."""
        columns = [[row[at + i] for row in rows] for i in range(self.width)]
        # The engine's counters: who is behind must not turn them back.
        values = [max(column) if self.engine else sum(column) for column in columns]
        if self.kind == "histogram":
            bounds = [*map(floatToGoString, self.buckets), "+Inf"]
            histogram = HistogramMetricFamily(self.name, self.help)
            histogram.add_metric([], list(zip(bounds, accumulate(values[1:]), strict=True)), values[0])
            return histogram
        kind = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family = kind(self.name, self.help, labels=[self.label] if self.label else None)
        for label, value in zip(self.labels, values, strict=True):
            if value or label not in STATUSES:
                family.add_metric([label] if label else [], value)
        return family


STATUSES = ("400", "401", "404", "405", "408", "413", "415", "429", "499", "500", "503", "other")
"""What `refused_requests` tells apart; one that never came is not shown."""

_counter = functools.partial(Series, kind="counter")
_gauge = functools.partial(Series, kind="gauge")
_histogram = functools.partial(Series, kind="histogram")

ENGINE = (
    _counter("paceline_prefix_query_tokens", "Prompt tokens looked up in the prefix cache", engine="prefix_queries"),
    _counter("paceline_prefix_hit_tokens", "Prompt tokens found in the prefix cache", engine="prefix_hits"),
    _counter(
        "paceline_preemptions", "Sequences that lost their KV blocks and are computed again", engine="preemptions"
    ),
    _counter("paceline_steps", "Steps of the engine", engine="steps"),
    _counter("paceline_step_tokens", "Tokens computed in all steps", engine="step_tokens"),
)
OPEN = _gauge("paceline_open_requests", "HTTP requests for text that are open")
UNSTARTED = _gauge("paceline_unstarted", "Sequences of open requests that have no token yet")
PROMPT_TOKENS = _counter("paceline_prompt_tokens", "Prompt tokens of requests that got a first token")
GENERATION_TOKENS = _counter("paceline_generation_tokens", "Tokens generated")
FINISHED = _counter(
    "paceline_finished",
    "Sequences that ended, by finish reason",
    label="reason",
    labels=("stop", "length", "abort", "error"),
)
REFUSED = _counter(
    "paceline_refused_requests", "Requests answered with an error status", label="status", labels=STATUSES
)
TTFT = _histogram(
    "paceline_ttft_seconds", "From a request's arrival to the first token of a sequence", buckets=TTFT_BUCKETS
)
TPOT = _histogram(
    "paceline_tpot_seconds",
    "(last token - first token) / (n - 1) of a sequence with n >= 2 tokens",
    buckets=TOKEN_BUCKETS,
)
ITL = _histogram(
    "paceline_itl_seconds", "Gap between deltas of a sequence / tokens in the later delta", buckets=TOKEN_BUCKETS
)
E2E = _histogram(
    "paceline_e2e_seconds", "From a request's arrival to the last token of a sequence", buckets=E2E_BUCKETS
)
QUEUE = _histogram(
    "paceline_queue_seconds", "From a request's arrival at the engine to its first step", buckets=TTFT_BUCKETS
)
SERIES = (*ENGINE, OPEN, UNSTARTED, PROMPT_TOKENS, GENERATION_TOKENS, FINISHED, REFUSED, TTFT, TPOT, ITL, E2E, QUEUE)
OFFSETS = dict(zip(SERIES, accumulate((series.width for series in SERIES), initial=0), strict=False))
WIDTH = sum(series.width for series in SERIES)


def make_board(processes: int = 1, file: Path | None = None) -> Board:
    """The board on which `Metrics` of that many processes meet."""
    return Board(processes, WIDTH, file)


class Number:
    """A counter or gauge. Only this process's share can be changed."""

    def __init__(self, board: Board, process: int, series: Series) -> None:
        self._row, self._rows, self._at = board.rows[process], board.rows, OFFSETS[series]

    def add(self, amount: float, label: int = 0) -> None:
        self._row[self._at + label] += amount

    @property
    def total(self) -> float:
        """Of all processes; without labels."""
        return sum(row[self._at] for row in self._rows)


class Histogram:
    def __init__(self, board: Board, process: int, series: Series) -> None:
        self._row, self._at, self._buckets = board.rows[process], OFFSETS[series], series.buckets

    def observe(self, value: float) -> None:
        self._row[self._at] += value
        self._row[self._at + 1 + bisect_left(self._buckets, value)] += 1


class Metrics:
    """All series of one server.

    Args:
        board: from `make_board`.
        process: number of this process, its row on the board. One that takes the place of a dead one goes on counting
            where that stopped.
    """

    def __init__(self, board: Board | None = None, process: int = 0) -> None:
        self._board = board = board or make_board()
        self._row = board.rows[process]
        for gauge in (OPEN, UNSTARTED):
            self._row[OFFSETS[gauge]] = 0.0
        number = functools.partial(Number, board, process)
        histogram = functools.partial(Histogram, board, process)
        self.open, self.unstarted = number(OPEN), number(UNSTARTED)
        self.prompt_tokens, self.generation_tokens = number(PROMPT_TOKENS), number(GENERATION_TOKENS)
        self.finished, self.refused = number(FINISHED), number(REFUSED)
        self.ttft, self.tpot, self.itl = histogram(TTFT), histogram(TPOT), histogram(ITL)
        self.e2e, self.queue_time = histogram(E2E), histogram(QUEUE)
        self._stats, self._leaks = CoreStats(), 0
        self.registry = CollectorRegistry()
        self.registry.register(self)

    @never_raises
    def update(self, stats: CoreStats, idle_check_failures: int = 0) -> None:
        """Takes over the engine's state. A counter that has fallen keeps its value."""
        self._stats, self._leaks = stats, idle_check_failures
        for series in ENGINE:
            now, before = getattr(stats, series.engine), self._row[OFFSETS[series]]
            if now < before:
                log.warning("metrics: the engine's %s fell from %d to %d", series.engine, before, now)
            self._row[OFFSETS[series]] = max(now, before)

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        stats = self._stats
        yield GaugeMetricFamily("paceline_running", "Sequences that run in the engine", stats.running)
        yield GaugeMetricFamily("paceline_waiting", "Sequences that wait in the engine", stats.waiting)
        yield GaugeMetricFamily(
            "paceline_kv_used_ratio", "Share of the KV blocks that live sequences hold, 0 to 1", stats.kv_used
        )
        yield GaugeMetricFamily(
            "paceline_idle_check_failures",
            "Times the idle engine still held something of a request: each is a bug",
            self._leaks,
        )
        for series in SERIES:
            yield series.family(self._board.rows, OFFSETS[series])

    def text(self) -> bytes:
        return generate_latest(self.registry)

    @never_raises
    def refuse(self, status: int) -> None:
        name = str(status)
        self.refused.add(1, STATUSES.index(name if name in STATUSES else "other"))

    def request(self, arrival: float, prompt_lens: list[int], n: int) -> "RequestMeter":
        """A meter for a request that arrived at ``arrival`` (`time.monotonic`)."""
        return RequestMeter(self, arrival, prompt_lens, n)


@dataclass(slots=True)
class Times:
    """Of one sequence."""

    first: float
    last: float
    tokens: int


class RequestMeter:
    """Times one request, sequence by sequence."""

    def __init__(self, metrics: Metrics, arrival: float, prompt_lens: list[int], n: int) -> None:
        self._metrics = metrics
        self._arrival = arrival
        self._prompt_lens = prompt_lens
        self._n = n
        self._started: set[int] = set()
        self._times: dict[tuple[int, int], Times] = {}
        self._finished = 0

    @never_raises
    def delta(self, prompt: int, delta: Delta) -> None:
        """One delta of prompt number ``prompt``, just received."""
        now = time.monotonic()
        metrics, tokens = self._metrics, len(delta.ids)
        times = self._times.get((prompt, delta.candidate))
        if times is None and prompt not in self._started:
            self._started.add(prompt)
            metrics.prompt_tokens.add(self._prompt_lens[prompt])
            metrics.queue_time.observe(max(0.0, delta.queued_s))
        if tokens:
            metrics.generation_tokens.add(tokens)
            if times is None:
                times = self._times[prompt, delta.candidate] = Times(now, now, tokens)
                metrics.ttft.observe(now - self._arrival)
            else:
                metrics.itl.observe((now - times.last) / tokens)
                times.last = now
                times.tokens += tokens
        if delta.finish is not None:
            self._finished += 1
            self._finish(delta.finish.value)
            if times is not None:
                metrics.e2e.observe(times.last - self._arrival)
                if times.tokens >= 2:
                    metrics.tpot.observe((times.last - times.first) / (times.tokens - 1))

    @never_raises
    def close(self, reason: str) -> None:
        """The request is over; sequences that have not ended did so for ``reason``."""
        left = len(self._prompt_lens) * self._n - self._finished
        if left:
            self._finished += left
            self._finish(reason, left)

    def _finish(self, reason: str, count: int = 1) -> None:
        self._metrics.finished.add(count, FINISHED.labels.index(reason))
