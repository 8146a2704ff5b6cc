"""Scheduler and runner, joined: requests in, one call a step, outputs out."""

from collections import deque

from paceline.engine.limits import Limits
from paceline.engine.request import CoreOutput, CoreStats, Request
from paceline.engine.scheduler import Scheduled, Scheduler
from paceline.engine.step import Handle, Runner


class EngineCore:
    """Keeps up to ``depth`` steps under way, so that the device never waits for the host.

    Not thread-safe: one thread calls everything. An exception from the runner leaves the core unusable.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, depth: int, limits: Limits) -> None:
        if depth < 1:
            raise ValueError("depth must be at least 1")
        self.limits = limits
        self._scheduler = scheduler
        self._runner = runner
        self._depth = depth
        self._under_way: deque[tuple[Scheduled, Handle]] = deque()

    def add(self, request: Request) -> None:
        """Queues a request that passed `Limits.check`."""
        self._scheduler.add(request)

    def abort(self, request: int, candidate: int | None = None) -> None:
        """Ends a request, or one of its candidates, silently. Too late is no error."""
        self._scheduler.abort(request, candidate)

    def step(self) -> list[CoreOutput]:
        """Fills the pipeline, waits for its oldest step and returns what that step brought."""
        while len(self._under_way) < self._depth:
            scheduled = self._scheduler.schedule()
            if scheduled is None:
                break
            self._under_way.append((scheduled, self._runner.submit(scheduled.step)))
        if not self._under_way:
            return []
        scheduled, handle = self._under_way.popleft()
        return self._scheduler.commit(scheduled, handle.result())

    def idle(self) -> bool:
        """Lets the runner use a moment without work. Returns whether it has more to do in such moments."""
        return self._runner.idle()

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def stats(self) -> CoreStats:
        """Counters so far, and what runs, waits and is held now."""
        return self._scheduler.snapshot()

    def check_idle(self) -> None:
        """Asserts that no request left anything behind. Call it when ``has_work`` is False."""
        assert not self._under_way, "a step is under way"
        self._scheduler.check_idle()

    def close(self) -> None:
        """Waits for steps under way and frees the device."""
        while self._under_way:
            self._under_way.popleft()[1].result()
        self._runner.close()
