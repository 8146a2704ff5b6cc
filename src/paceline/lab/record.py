"""What happened to one request, as the client's clock saw it."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestRecord:
    """Times are seconds from the start of the stage, by one monotonic clock. What was not seen is None, never 0."""

    id: int
    due: float
    """Scheduled send; for a request that waits for another the end of that one plus its delay."""
    connecting: float | None = None
    """When the client began to open a connection for it; None: it had one. A server that is slow to accept delays what
    follows, not the client."""
    sent: float | None = None
    """When its first byte was handed to the socket; None: never sent."""
    headers: float | None = None
    """When the status line had arrived."""
    deltas: list[tuple[float, int]] = field(default_factory=list)
    """(arrival of its bytes, generated tokens it carries) of every delta that carries any: text, reasoning, tool
    calls, or usage that shows a token. A role alone is none. Where the server does not count (no continuous usage) the
    tokens of all but the last are 1, the last has the rest of the usage but at least 1, and ``counted`` is False: the
    sum is more than ``output_tokens`` where there are more deltas than tokens."""
    counted: bool = False
    """Whether the server's continuous usage gave the tokens of each delta."""
    ended: float | None = None
    """When the last byte of the reply arrived."""
    prompt_tokens: int | None = None
    """By the server's usage."""
    output_tokens: int | None = None
    """By the server's usage; None where it does not say, or something that is no count."""
    wrong_usage: str | None = None
    """The usage's ``completion_tokens`` where it is no count, such as ``"8"``, ``true`` or ``-8``."""
    cached_tokens: int | None = None
    expected_tokens: int | None = None
    """Tokens asked for where the reply shall not end before (``ignore_eos``), whether or not the server takes that."""
    status: int | None = None
    """HTTP status."""
    finish: str | None = None
    error: str | None = None
    """Why it failed: a status, an error event inside a 200, an empty reply, a stream that ended early, the deadline, a
    connection. None: it did not."""
    text: str | None = None
    """The reply, where it was kept."""

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def begun(self) -> float | None:
        """When the client turned to it: began to connect, or sent."""
        return self.sent if self.connecting is None else self.connecting

    @property
    def first(self) -> float | None:
        """When the first generated token arrived."""
        return self.deltas[0][0] if self.deltas else None

    @property
    def last(self) -> float | None:
        """When the last generated token arrived."""
        return self.deltas[-1][0] if self.deltas else None

    @property
    def ttft(self) -> float | None:
        """Seconds from the scheduled send to the first token; of a failed request None."""
        return None if self.first is None or not self.ok else self.first - self.due

    @property
    def ttft_from_send(self) -> float | None:
        """Seconds from when the client turned to it."""
        return None if self.first is None or self.begun is None or not self.ok else self.first - self.begun

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first: (last - first) / (n - 1), n by the server's usage; None for fewer than 2,
        and where all came at one time."""
        n = self.output_tokens
        if not self.ok or self.first is None or self.last is None or n is None or n < 2 or self.last <= self.first:
            return None
        return (self.last - self.first) / (n - 1)

    @property
    def e2e(self) -> float | None:
        """Seconds from the scheduled send to the last token."""
        return None if self.last is None or not self.ok else self.last - self.due
