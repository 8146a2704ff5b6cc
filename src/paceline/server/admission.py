"""Who may come in: counts what is open and what waits, and says no before anything is allocated."""

from dataclasses import dataclass

from paceline.server.config import ServerConfig
from paceline.server.errors import busy, invalid


@dataclass(slots=True)
class Ticket:
    """A request that was let in. `started` and `close` give its places back; `close` may be called again."""

    admission: "Admission"
    waiting: int
    closed: bool = False

    def started(self, sequences: int) -> None:
        """That many of its sequences have their first token."""
        count = min(sequences, self.waiting)
        self.waiting -= count
        self.admission.waiting -= count

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.started(self.waiting)
            self.admission.open -= 1


class Admission:
    """Attributes:
    open: requests for text under way.
    waiting: sequences without a first token.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self.open = 0
        self.waiting = 0

    def enter(self, prompts: int, n: int) -> Ticket:
        """Raises a 429 when the server is full, a 400 when the request alone is too large for it."""
        config = self._config
        sequences = prompts * n
        if sequences > config.max_waiting:
            raise invalid("n", f"{prompts} prompts times n={n} is more than this server queues, {config.max_waiting}")
        if self.open >= config.max_concurrent:
            raise busy(f"{self.open} requests are open, the most that this server takes; try again later")
        if self.waiting + sequences > config.max_waiting:
            raise busy(
                f"the queue is full: {self.waiting} sequences wait, at most {config.max_waiting} may; try again later"
            )
        self.open += 1
        self.waiting += sequences
        return Ticket(self, sequences)
