"""Time: one clock that jumps, and one that passes."""

import time
from typing import Protocol

SPIN_S = 0.0002
"""A sleep ends up to this much late; the last part of a wait looks at the clock instead."""


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since an origin of its own."""

    def wait_until(self, moment: float) -> None:
        """Returns when it is ``moment``, at once when that has passed."""


class VirtualClock:
    """Jumps."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def wait_until(self, moment: float) -> None:
        if moment > self._now:
            self._now = moment


class RealClock:
    """`time.monotonic`. Waits are exact to some microseconds where the operating system gives the thread a core."""

    def now(self) -> float:
        return time.monotonic()

    def wait_until(self, moment: float) -> None:
        left = moment - time.monotonic()
        if left > SPIN_S:
            time.sleep(left - SPIN_S)
        while time.monotonic() < moment:
            pass
