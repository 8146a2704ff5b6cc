"""One measured point, as the results file holds it: the contract of ``--json`` (``docs/lab.md`` describes it)."""

from dataclasses import dataclass, field
from typing import Any

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of the measured values; every field None where there is none."""

    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    max: float | None


@dataclass(frozen=True, slots=True)
class Counts:
    sent: int
    ok: int
    failed: int
    """``sent - ok``, and those that were never sent because the stage ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One stage, measured. Seconds throughout."""

    name: str
    target: str = ""
    """Name of the engine that was measured."""
    load: dict[str, Any]
    offered_rate: float | None
    achieved_rate: float | None
    """Requests sent a second, over the time in which they were due."""
    batch: int | None
    batch_kind: str | None = None
    """``engine``: the engine's own limit was set to ``batch``; ``client``: so many requests were kept open."""
    valid: bool
    reasons: list[str]
    """Why it is not valid; each starts with a word that names the check."""
    notes: list[str] = field(default_factory=list)
    """What a reader must know though the point is valid (``saturated``, ``warmup``, ...); named as reasons are."""
    requests: Counts
    errors: dict[str, int] = field(default_factory=dict)
    """Message -> how many requests failed with it."""
    ttft_s: Statistics
    ttft_from_send_s: Statistics
    tpot_s: Statistics
    itl_s: Statistics
    """Gaps between deltas, each divided by the tokens of the later delta, which counts as often as it has tokens."""
    e2e_s: Statistics
    output_tokens: int
    """Of completed requests, by the server's usage."""
    prompt_tokens: int
    window_s: float | None
    """First scheduled send to the last token of a completed reply."""
    output_tokens_per_s: float | None
    requests_per_s: float | None
    """Completed requests / window."""
    goodput_rps: float | None
    """Requests that kept every constraint / window; None without constraints."""
    attainment: float | None
    """Share of the requests that kept every constraint, of those sent and those that could not be."""
    attainment_interval: tuple[float, float] | None = None
    """95% confidence interval (Wilson) of the attainment, of ``effective_requests``."""
    effective_requests: float | None = None
    """So many independent requests tell as much of the attainment as those sent: fewer where misses come in runs."""
    constraints: dict[str, bool | None] = field(default_factory=dict)
    """Constraint, as written -> whether the point keeps it; None: not measured, which does not keep it. A percentile is
    kept by a share of all requests: those that failed did not."""
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    """``ttft_s.mean``, ``tpot_s.p99``, ``output_tokens_per_s``, ... -> 95% confidence interval; missing where the run
    is too short for one."""
    client: dict[str, float] = field(default_factory=dict)
    """What the client knows of itself: ``lateness_p99_s``, ``loop_delay_p99_s``, ``workers``, ``cpu``."""
    gpu: dict[str, float] | None = None
    """``gpus``, ``power_w``, ``energy_j``, ``utilisation`` of the GPUs seen at work; None: there was none."""
