"""One candidate of a request, as the scheduler sees it."""

from dataclasses import dataclass, field

from paceline.engine.request import Finish, Request
from paceline.engine.step import TokenLogprobs


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens on their way through the model. It needs a step as long as ``computed < length``: whether a token came
    from the prompt, from sampling, or must be computed again after a preemption makes no difference."""

    request: Request
    candidate: int
    limit: int
    """Longest it may become: prompt and output."""
    tokens: list[int]
    """Prompt and committed output."""
    pending: int = 0
    """Tokens sampled by steps under way, not known here yet."""
    computed: int = 0
    """Leading tokens whose keys and values are written once every submitted step is done."""
    committed: int = 0
    """The same, counting only committed steps."""
    row: int | None = None
    """Its seat while it runs."""
    life: int = 0
    """Counts admissions, so that a step from before a preemption is told from one after it."""
    tables: list[list[int]] = field(default_factory=list)
    """Block table of each KV group."""
    keys: list[bytes] = field(default_factory=list)
    """Prefix key of each full block of ``tokens``, as far as computed."""
    published: int = 0
    """Blocks of this life that the prefix index knows or was offered."""
    prompt_done: bool = False
    """Its whole prompt was computed at some time, so siblings can share it."""
    passed_over: int = 0
    """Requests admitted before it while it waited for blocks."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish | None = None
    admitted: bool = False
    reported: bool = False
    """Whether an output went out already; the first carries what is told once."""
    cached_tokens: int = 0
    queued_s: float = 0.0

    @property
    def order(self) -> tuple[int, float, int, int]:
        """Who goes first: priority, then arrival."""
        return (self.request.priority, self.request.arrival, self.request.id, self.candidate)

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    @property
    def length(self) -> int:
        return len(self.tokens) + self.pending

    @property
    def remaining(self) -> int:
        """Tokens still to compute. 0 once the last token it may have is sampled: nobody needs its keys and values."""
        length = self.length
        if length >= self.limit and length > self.prompt_len:
            return 0
        return length - self.computed

    @property
    def wants_prompt_logprobs(self) -> bool:
        params = self.request.params
        return (
            params.prompt_logprobs is not None
            and self.candidate == 0
            and len(self.prompt_logprobs) < self.prompt_len - 1
        )
