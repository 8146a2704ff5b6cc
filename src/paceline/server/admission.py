"""Who may come in: counts what is open and what waits, and says no before anything is allocated."""

from dataclasses import dataclass

from paceline.server.config import ServerConfig
from paceline.server.errors import busy, invalid
from paceline.server.metrics import Metrics


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
        self.admission.metrics.unstarted.add(-count)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.started(self.waiting)
            self.admission.metrics.open.add(-1)


class Admission:
    """Counts on the board of ``metrics``, so that the limits are those of the whole server. Processes that decide in
    the same instant do not see each other, and may then let in one request each where there was room for one."""

    def __init__(self, config: ServerConfig, metrics: Metrics) -> None:
        self._config = config
        self.metrics = metrics

    @property
    def open(self) -> int:
        """Requests for text under way."""
        return int(self.metrics.open.total)

    @property
    def waiting(self) -> int:
        """Sequences without a first token."""
        return int(self.metrics.unstarted.total)

    def enter(self, prompts: int, n: int) -> Ticket:
        """Raises a 429 when the server is full, a 400 when the request alone is too large for it."""
        config = self._config
        sequences = prompts * n
        if sequences > config.max_waiting:
            raise invalid("n", f"{prompts} prompts times n={n} is more than this server queues, {config.max_waiting}")
        if (open_requests := self.open) >= config.max_concurrent:
            raise busy(f"{open_requests} requests are open, the most that this server takes; try again later")
        if (waiting := self.waiting) + sequences > config.max_waiting:
            raise busy(
                f"the queue is full: {waiting} sequences wait, at most {config.max_waiting} may; try again later"
            )
        self.metrics.open.add(1)
        self.metrics.unstarted.add(sequences)
        return Ticket(self, sequences)
