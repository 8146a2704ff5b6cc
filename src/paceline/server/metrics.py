"""Prometheus metrics. Nothing here can fail a request: errors are logged and the sample is lost."""

import functools
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from paceline.engine.output import Delta
from paceline.engine.request import CoreStats

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


class Metrics:
    """All series of one server, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = functools.partial(Counter, registry=self.registry)
        gauge = functools.partial(Gauge, registry=self.registry)
        histogram = functools.partial(Histogram, registry=self.registry)
        self.running = gauge("paceline_running", "Sequences that run in the engine")
        self.waiting = gauge("paceline_waiting", "Sequences that wait in the engine")
        self.kv_used = gauge("paceline_kv_used_ratio", "Share of the KV blocks that live sequences hold, 0 to 1")
        self.open = gauge("paceline_open_requests", "HTTP requests for text that are open")
        self.idle_check_failures = gauge(
            "paceline_idle_check_failures", "Times the idle engine still held something of a request: each is a bug"
        )
        self.prefix_queries = counter("paceline_prefix_query_tokens", "Prompt tokens looked up in the prefix cache")
        self.prefix_hits = counter("paceline_prefix_hit_tokens", "Prompt tokens found in the prefix cache")
        self.preemptions = counter("paceline_preemptions", "Sequences that lost their KV blocks and are computed again")
        self.steps = counter("paceline_steps", "Steps of the engine")
        self.step_tokens = counter("paceline_step_tokens", "Tokens computed in all steps")
        self.prompt_tokens = counter("paceline_prompt_tokens", "Prompt tokens of requests that got a first token")
        self.generation_tokens = counter("paceline_generation_tokens", "Tokens generated")
        self.finished = counter("paceline_finished", "Sequences that ended, by finish reason", ["reason"])
        self.refused = counter("paceline_refused_requests", "Requests answered with an error status", ["status"])
        self.ttft = histogram(
            "paceline_ttft_seconds", "From a request's arrival to the first token of a sequence", buckets=TTFT_BUCKETS
        )
        self.tpot = histogram(
            "paceline_tpot_seconds",
            "(last token - first token) / (n - 1) of a sequence with n >= 2 tokens",
            buckets=TOKEN_BUCKETS,
        )
        self.itl = histogram(
            "paceline_itl_seconds",
            "Gap between deltas of a sequence / tokens in the later delta",
            buckets=TOKEN_BUCKETS,
        )
        self.e2e = histogram(
            "paceline_e2e_seconds", "From a request's arrival to the last token of a sequence", buckets=E2E_BUCKETS
        )
        self.queue_time = histogram(
            "paceline_queue_seconds", "From a request's arrival at the engine to its first step", buckets=TTFT_BUCKETS
        )
        for reason in ("stop", "length", "abort", "error"):
            self.finished.labels(reason)
        self._seen = CoreStats()

    @never_raises
    def update(self, stats: CoreStats, open_requests: int, idle_check_failures: int = 0) -> None:
        """Takes over the engine's state. Its counters may fall back, as when it restarts: that adds nothing."""
        self.running.set(stats.running)
        self.waiting.set(stats.waiting)
        self.kv_used.set(stats.kv_used)
        self.open.set(open_requests)
        self.idle_check_failures.set(idle_check_failures)
        self._advance(self.prefix_queries, "prefix_queries", stats)
        self._advance(self.prefix_hits, "prefix_hits", stats)
        self._advance(self.preemptions, "preemptions", stats)
        self._advance(self.steps, "steps", stats)
        self._advance(self.step_tokens, "step_tokens", stats)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    @never_raises
    def refuse(self, status: int) -> None:
        self.refused.labels(str(status)).inc()

    def request(self, arrival: float, prompt_lens: list[int], n: int) -> "RequestMeter":
        """A meter for a request that arrived at ``arrival`` (`time.monotonic`)."""
        return RequestMeter(self, arrival, prompt_lens, n)

    def _advance(self, counter: Counter, name: str, stats: CoreStats) -> None:
        now, before = getattr(stats, name), getattr(self._seen, name)
        if now < before:
            log.warning("metrics: the engine's %s fell from %d to %d", name, before, now)
        counter.inc(max(0, now - before))
        setattr(self._seen, name, now)


class RequestMeter:
    """Times one request, sequence by sequence."""

    def __init__(self, metrics: Metrics, arrival: float, prompt_lens: list[int], n: int) -> None:
        self._metrics = metrics
        self._arrival = arrival
        self._prompt_lens = prompt_lens
        self._n = n
        self._started: set[int] = set()
        self._first: dict[tuple[int, int], float] = {}
        self._last: dict[tuple[int, int], float] = {}
        self._tokens: dict[tuple[int, int], int] = {}
        self._finished = 0

    @never_raises
    def delta(self, prompt: int, delta: Delta) -> None:
        """One delta of prompt number ``prompt``, just received."""
        now = time.monotonic()
        metrics, key, tokens = self._metrics, (prompt, delta.candidate), len(delta.ids)
        if prompt not in self._started:
            self._started.add(prompt)
            metrics.prompt_tokens.inc(self._prompt_lens[prompt])
            metrics.queue_time.observe(max(0.0, delta.queued_s))
        if tokens:
            metrics.generation_tokens.inc(tokens)
            last = self._last.get(key)
            if last is None:
                self._first[key] = now
                metrics.ttft.observe(now - self._arrival)
            else:
                metrics.itl.observe((now - last) / tokens)
            self._last[key] = now
            self._tokens[key] = self._tokens.get(key, 0) + tokens
        if delta.finish is not None:
            self._finished += 1
            metrics.finished.labels(delta.finish.value).inc()
            last = self._last.get(key)
            if last is not None:
                metrics.e2e.observe(last - self._arrival)
                if self._tokens[key] >= 2:
                    metrics.tpot.observe((last - self._first[key]) / (self._tokens[key] - 1))

    @never_raises
    def close(self, reason: str) -> None:
        """The request is over; sequences that have not ended did so for ``reason``."""
        left = len(self._prompt_lens) * self._n - self._finished
        if left:
            self._finished += left
            self._metrics.finished.labels(reason).inc(left)
