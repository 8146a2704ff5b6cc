"""What crosses between the front (text, HTTP) and the core (tokens), in both directions."""

from dataclasses import dataclass, field
from enum import StrEnum

from paceline.engine.sampling_params import SamplingParams
from paceline.engine.step import TokenLogprobs


class Finish(StrEnum):
    """Why a candidate ended, in OpenAI's words where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True, kw_only=True)
class Request:
    """One prompt to continue ``params.n`` times. Already checked (`engine/limits.py`)."""

    id: int
    """The front's own number, unique while the request lives; never the client's."""
    prompt: list[int]
    params: SamplingParams
    seed: int
    """``params.seed``, or a random signed 64-bit number when that is None."""
    arrival: float
    """`time.monotonic()` when the front received it."""
    priority: int = 0
    """Lower runs first."""
    cache_salt: str = ""
    """Requests share cached prefixes only with requests of the same salt."""


@dataclass(slots=True, kw_only=True)
class CoreOutput:
    """What one step brought one candidate."""

    request: int
    candidate: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    """Aligned with ``ids`` when the request asked for logprobs."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Entries for prompt tokens 1, 2, ...: complete, once, on candidate 0's first output."""
    finish: Finish | None = None
    stop_id: int | None = None
    """The end-of-sequence or stop id that ended it; also the last of ``ids``."""
    error: str = ""
    """Set with ``Finish.ERROR``."""
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache supplied at first admission."""
    queued_s: float = 0.0
    """Seconds from arrival to first admission."""


@dataclass(slots=True, kw_only=True)
class CoreStats:
    """State of the core after a step; counters run from its start."""

    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0
    """Share of KV blocks that live sequences hold, 0 to 1; cached but unreferenced blocks are free."""
    steps: int = 0
    step_tokens: int = 0
    """Tokens computed in all steps so far."""
    preemptions: int = 0
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    """Of those, found."""
