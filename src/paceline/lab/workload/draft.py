"""A request before it has a place in time."""

from dataclasses import dataclass

from paceline.lab.stage import Prompt


@dataclass(frozen=True, slots=True)
class Draft:
    """What one request asks for. `open_stage` and `closed_stage` give it a due time."""

    prompt: Prompt
    output_tokens: int
    prompt_tokens: int | None = None
    """Where known; else the server's usage tells."""
    after: int | None = None
    """Index, in the list of drafts, of an earlier one that must have ended: the turn before this one."""
    delay_s: float = 0.0
    """Seconds from the end of ``after`` to this one's due time; unused without ``after``."""
    needs: bool = False
    """``prompt`` is the conversation without the replies of this run. That of ``after`` belongs before the messages
    that ``after`` did not have yet; see `lab.stage.PlannedRequest`."""
    time_s: float | None = None
    """Arrival in the trace that it comes from, in seconds from the trace's start."""
