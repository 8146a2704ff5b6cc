"""A log of what every step had to do and how long it took."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from paceline.engine.config import InvalidConfig
from paceline.engine.seated_rows import SeatedRows
from paceline.engine.step import Handle, KVGroup, Runner, Step, StepResult
from paceline.engine.step_time import StepWork


@dataclass(frozen=True, slots=True)
class LoggedStep:
    work: StepWork
    seconds: float
    """From its submission, or from the end of the step before if that was later, to its end: what it added to the time
    that steps took."""


class LoggingRunner:
    """A runner that writes a line of JSON for each step of another: the fields of `StepWork`, and ``seconds``.

    Steps that compute nothing are left out.

    Args:
        runner: carries out the steps.
        path: of the log; what was there is lost.
        block_size: tokens in a KV block.

    Raises:
        InvalidConfig: the log cannot be written.
    """

    def __init__(self, runner: Runner, path: Path, block_size: int) -> None:
        self._runner = runner
        self._rows = SeatedRows(block_size)
        self._ended = 0.0
        try:
            self._file: IO[str] = path.open("w", encoding="utf-8")
        except OSError as error:
            raise InvalidConfig(f"step_log: cannot write {path}: {error.strerror}") from error

    @property
    def kv_groups(self) -> Sequence[KVGroup]:
        return self._runner.kv_groups

    def submit(self, step: Step) -> Handle:
        work, _ = self._rows.apply(step)
        return _LoggedHandle(self, work, time.monotonic(), self._runner.submit(step))

    def idle(self) -> bool:
        self._file.flush()
        return self._runner.idle()

    def close(self) -> None:
        self._file.close()
        self._runner.close()

    def ended(self, work: StepWork, submitted: float) -> None:
        began, self._ended = max(submitted, self._ended), time.monotonic()
        if work.tokens:
            self._file.write(json.dumps({**asdict(work), "seconds": round(self._ended - began, 7)}) + "\n")


@dataclass(slots=True)
class _LoggedHandle:
    log: LoggingRunner
    work: StepWork
    submitted: float
    handle: Handle

    def result(self) -> StepResult:
        result = self.handle.result()
        self.log.ended(self.work, self.submitted)
        return result


def read_step_log(path: Path) -> list[LoggedStep]:
    """The steps of a log, without a last line that was cut off.

    Raises:
        ValueError: it is no step log; names the line.
    """
    steps = []
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines[:-1], 1):
        try:
            entry = json.loads(line)
            seconds = float(entry.pop("seconds"))
            steps.append(LoggedStep(StepWork(**entry), seconds))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}, line {number}: is no step of a step log: {error}") from error
    return steps
