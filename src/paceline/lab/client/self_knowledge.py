"""What a worker knows of itself: how late it looks at its sockets, and how busy it is."""

import time
from collections.abc import Sequence
from math import ceil

TICK_S = 0.005


class SelfKnowledge:
    """A clock that ticks every `TICK_S`: how late the loop notices a tick is how late it would have noticed bytes that
    arrived at that moment. A long stall counts with all ticks that fell into it."""

    def __init__(self, start: float) -> None:
        self.next_tick = start
        self.bytes = 0
        self.chunks = 0
        self._delays: list[float] = []
        self._window = (start, time.process_time())
        self._cpu = 0.0

    def tick(self, now: float) -> None:
        """Called when ``next_tick`` has come."""
        while self.next_tick <= now:
            self._delays.append(now - self.next_tick)
            self.next_tick += TICK_S
        if now - self._window[0] >= 1:
            self._close_window(now)

    def summary(self, now: float) -> dict[str, float]:
        if not self._cpu and now > self._window[0]:  # Less than a second in all.
            self._close_window(now)
        loop = percentiles("loop_delay", sorted(self._delays))
        return {"bytes": self.bytes, "chunks": self.chunks, "cpu": self._cpu, **loop}

    def _close_window(self, now: float) -> None:
        since, used = self._window
        self._window = now, time.process_time()
        self._cpu = max(self._cpu, (self._window[1] - used) / (now - since))


def percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    """``NAME_p50_s``, ``_p99_s``, ``_p999_s`` (99.9%; nearest rank) and ``_max_s`` of sorted values; nothing
    where there is none."""
    shares = {"p50": 0.5, "p99": 0.99, "p999": 0.999, "max": 1.0} if values else {}
    return {f"{name}_{key}_s": values[ceil(share * len(values)) - 1] for key, share in shares.items()}
