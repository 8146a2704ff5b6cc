"""Shows how far start-up is: a bar on a terminal, log lines elsewhere."""

import logging
import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

log = logging.getLogger(__name__)


class StartProgress:
    """Called with the name of a stage and the share of it that is done, 0 to 1."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._done: set[str] = set()
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f}%"),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, stage: str, share: float) -> None:
        first = stage not in self._tasks
        if self._bar is not None:
            if first:
                self._tasks[stage] = self._bar.add_task(stage, total=1.0)
            self._bar.update(self._tasks[stage], completed=share)
            return
        if first:
            self._tasks[stage] = TaskID(len(self._tasks))
            log.info("%s ...", stage)
        if share >= 1.0 and stage not in self._done:
            self._done.add(stage)
            log.info("%s: done", stage)
