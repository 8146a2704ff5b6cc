"""A step: one pass over the model for a set of rows, as the scheduler orders it and the runner carries it out.

A *row* is a seat at the runner, held by one sequence while it runs. The runner keeps a row's tokens, block tables and
sampling state between steps, so a step names only what changed. Steps are self-contained and ordered: every
runner that applies the same steps in order holds the same rows.

    removed -> added -> new blocks -> compute -> sample

Whether a row samples is not sent, because both sides know it: a row samples in a step exactly when that step computes
the last token it has, ``computed + advance == length``; the sampled token then becomes its next one, ``length += 1``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.engine.sampling_params import SamplingParams

SINK_BLOCK = 0
"""KV block that no sequence owns: padding writes there, and a table entry that lies outside a window points to it."""


@dataclass(slots=True)
class RowStart:
    """A sequence taking its seat: a new one, or one that resumes after a preemption."""

    row: int
    tokens: list[int]
    """Every token known: the prompt, then what was generated before a preemption."""
    prompt_len: int
    """How many of ``tokens`` are the prompt; penalties tell prompt from output by it."""
    computed: int
    """Leading tokens whose keys and values the blocks already hold, at most ``len(tokens) - 1``."""
    blocks: list[list[int]]
    """Block table so far, one list per KV group."""
    params: SamplingParams
    seed: int
    """The request's seed, drawn for it when it named none (signed 64-bit)."""
    candidate: int
    """Index among the request's ``n``; (seed, candidate, position) determines every random draw."""
    stop_ids: list[int]
    """Ids that must not be sampled before ``params.min_tokens``."""
    prompt_logprobs: int | None
    """Alternatives to report per prompt token computed from here on; None: report nothing."""


@dataclass(slots=True)
class Step:
    """One step. Rows that hold a seat and are named nowhere advance by one token."""

    id: int
    removed: list[int] = field(default_factory=list)
    """Rows given up before anything else happens; no later step names them until they are added again."""
    added: list[RowStart] = field(default_factory=list)
    blocks: dict[int, list[list[int]]] = field(default_factory=dict)
    """Blocks appended to a seated row's tables: row -> one list per KV group."""
    advance: dict[int, int] = field(default_factory=dict)
    """Tokens a row computes in this step where that is not 1; 0 rests."""


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, from the raw logits (before temperature, penalties and masks)."""

    logprob: float
    """Of the token that stands there."""
    rank: int
    """1 for the most likely token."""
    top_ids: list[int]
    """The most likely alternatives, best first; as many as were asked for."""
    top_logprobs: list[float]


@dataclass(slots=True)
class StepResult:
    """What a step produced. ``rows``, ``counts`` and ``ids`` are flat and aligned."""

    rows: list[int] = field(default_factory=list)
    """Rows that sampled, each once."""
    counts: list[int] = field(default_factory=list)
    """Tokens that each of ``rows`` got."""
    ids: list[int] = field(default_factory=list)
    """Their ids, row after row."""
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """Row -> one entry per sampled token, for rows whose params ask for it."""
    prompt_logprobs: dict[int, tuple[int, list[TokenLogprobs]]] = field(default_factory=dict)
    """Row -> (position of the first entry, one per prompt token). Position 0 never appears: nothing predicts it."""
    errors: dict[int, str] = field(default_factory=dict)
    """Row -> why it cannot go on (for example: its logits are not finite). Other rows are unaffected. The row got no id
    in ``ids``; steps already under way advance it all the same, over any id the runner likes."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one block table because they keep the same tokens."""

    window: int | None
    """A token attends to itself and the ``window - 1`` before it; None: to all before it."""
    num_blocks: int
    """Blocks in this group's pool, the sink included."""


class Handle(Protocol):
    """A step under way."""

    def result(self) -> StepResult:
        """Waits for the step. Raises what the runner raised: then every row is lost."""


class Runner(Protocol):
    """Carries out steps on a device or on a clock."""

    @property
    def kv_groups(self) -> Sequence[KVGroup]:
        """KV groups with the capacity that the runner found room for."""

    def submit(self, step: Step) -> Handle:
        """Starts a step and returns at once. Steps take effect in the order of submission."""

    def idle(self) -> bool:
        """Does a little of what makes later steps faster; called while nothing is under way. Returns whether there is
        more to do."""

    def close(self) -> None:
        """Frees the device. No step may be under way."""
