"""Carries out steps on a clock: each takes the time that a model of steps predicts, and nothing is computed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.engine.seated_rows import SeatedRow, SeatedRows
from paceline.engine.step import KVGroup, Step, StepResult
from paceline.engine.step_time import StepTime, StepWork
from paceline.simulator.clock import Clock

NO_LOGPROBS = "a simulated model has no log-probabilities"


@dataclass(slots=True)
class TimedStep:
    """A step that ends at ``end``, by the clock."""

    clock: Clock
    end: float
    value: StepResult

    def result(self) -> StepResult:
        self.clock.wait_until(self.end)
        return self.value


@dataclass
class ClockRunner:
    """A device that is one queue: a step begins when it is submitted or the one before ends, whichever is later.

    The token at a position is a function of (seed, candidate, position): ids of ``vocabulary`` in turn. Ids that would
    end the request are passed over, so that it ends at ``max_tokens``, unless no others are allowed. What a request
    asks of probabilities has no effect, except that it fails when it asks for them.

    Args:
        step_time: of the device.
        clock: of the world in which steps are submitted.
        kv_groups: with the blocks that the device has room for.
        block_size: tokens in a block.
        vocabulary: ids to sample from.
        on_step: called with begin, end and work of every step, when it is submitted.
    """

    step_time: StepTime
    clock: Clock
    kv_groups: Sequence[KVGroup]
    block_size: int
    vocabulary: Sequence[int]
    on_step: Callable[[float, float, StepWork], None] | None = None
    _rows: SeatedRows = field(init=False)
    _own: dict[int, Sequence[int]] = field(init=False, default_factory=dict)
    """Vocabulary of each row that may not use all."""
    _free_at: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        if not self.vocabulary:
            raise ValueError("the vocabulary has no ids to sample from")
        self._rows = SeatedRows(self.block_size)
        self._ids = frozenset(self.vocabulary)

    def submit(self, step: Step) -> TimedStep:
        for row in step.removed:
            self._own.pop(row, None)
        for start in step.added:
            allowed = start.params.allowed_token_ids or self.vocabulary
            if start.params.allowed_token_ids or not self._ids.isdisjoint(start.stop_ids):
                self._own[start.row] = [token for token in allowed if token not in start.stop_ids] or allowed
        work, sampled = self._rows.apply(step)
        begin = max(self.clock.now(), self._free_at)
        self._free_at = begin + self.step_time.seconds(work)
        if self.on_step is not None:
            self.on_step(begin, self._free_at, work)
        return TimedStep(self.clock, self._free_at, self._sample(sampled))

    def idle(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def _sample(self, sampled: list[SeatedRow]) -> StepResult:
        result = StepResult()
        rows, ids = result.rows, result.ids
        everything, own = self.vocabulary, self._own
        size = len(everything)
        for state in sampled:
            start = state.start
            place = start.seed + start.candidate + state.computed
            if start.params.logprobs is not None or start.params.prompt_logprobs is not None:
                result.errors[start.row] = NO_LOGPROBS
                continue
            rows.append(start.row)
            if own and start.row in own:
                ids.append(own[start.row][place % len(own[start.row])])
            else:
                ids.append(everything[place % size])
        result.counts = [1] * len(rows)
        return result
