"""What to send and when: one stage of a measurement, complete before its first request is sent."""

from dataclasses import dataclass, field
from typing import Any

Prompt = list[int] | str | list[dict[str, Any]]
"""Token ids or text for ``/v1/completions``, or messages for ``/v1/chat/completions``."""

WARM_UP = "warm-up"
"""Name of the stage whose times nobody wants."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of a stage."""

    id: int
    """Its place in the stage's list of requests."""
    due: float
    """When it is to be sent: seconds from the start of the stage; or with ``after`` from the end of that request."""
    prompt: Prompt
    output_tokens: int
    """Tokens asked for; with ``ignore_eos`` also the number expected."""
    prompt_tokens: int | None = None
    """Where known; else the server's usage tells."""
    after: int | None = None
    """Id of the request that must have ended before: the turn before this one, or the last user of a seat of a closed
    loop. Never sent if that one failed and ``needs`` is set."""
    needs: bool = False
    """The prompt is only complete with the reply of ``after``: its text is inserted as the last assistant's message."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Requests under one load."""

    name: str
    """Unique in an experiment, for example ``rate=3``."""
    requests: list[PlannedRequest]
    load: dict[str, Any]
    """What makes the load, for reports: ``{"kind": "poisson", "rate": 3.0}``, ``{"kind": "concurrency", "batch": 8}``,
    ``{"kind": "burst"}``, ``{"kind": "trace", ...}``."""
    deadline_s: float
    """Seconds from the start after which what has not ended is cancelled and counts as failed."""
    offered_rate: float | None = None
    """Requests a second; None where the load has none (burst, closed loop)."""
    batch: int | None = None
    """Requests at once, of a closed loop or of an engine's own limit."""
    ignore_eos: bool = True
    sampling: dict[str, Any] = field(default_factory=lambda: {"temperature": 0})
    """More fields of every request's body."""
