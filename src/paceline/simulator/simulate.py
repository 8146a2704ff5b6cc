"""Requests through the engine's own scheduler in virtual time, on one replica or several."""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from paceline.engine.engine_core import EngineCore
from paceline.engine.limits import Limits
from paceline.engine.request import Request
from paceline.engine.sampling_params import SamplingParams
from paceline.engine.scheduler import Scheduler
from paceline.engine.step import KVGroup
from paceline.engine.step_time import StepWork
from paceline.simulator.clock import VirtualClock
from paceline.simulator.clock_runner import ClockRunner
from paceline.simulator.gpu_model import GpuModel

Routing = Literal["round_robin", "least_loaded"]
OnStep = Callable[[float, float, StepWork], None]
"""Called with begin, end and work of a step."""


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """What to simulate."""

    due: float
    """Seconds from the start; with ``after`` from the last token of that request."""
    prompt: Sequence[int]
    """Token ids. All that counts is where they equal those of other prompts."""
    output_tokens: int
    after: int | None = None
    """Index of the request that it follows. If that one fails, it is not sent."""


@dataclass(slots=True)
class Outcome:
    """What came of a request. Times are seconds from the start."""

    due: float | None = None
    """When it was sent; None: never."""
    replica: int | None = None
    scheduled: float | None = None
    """When it left its replica's queue."""
    cached_tokens: int = 0
    tokens: list[tuple[float, int]] = field(default_factory=list)
    """(when it is with the client, 1) of each token."""
    error: str | None = None
    """Why it was not served."""

    @property
    def first(self) -> float | None:
        return self.tokens[0][0] if self.tokens else None

    @property
    def last(self) -> float | None:
        return self.tokens[-1][0] if self.tokens else None

    @property
    def ttft(self) -> float | None:
        """Seconds from the send to the first token."""
        return None if self.first is None or self.due is None else self.first - self.due

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first; None for fewer than 2."""
        count = len(self.tokens)
        return None if count < 2 else (self.tokens[-1][0] - self.tokens[0][0]) / (count - 1)


def simulate(
    requests: Sequence[SimulatedRequest],
    model: GpuModel,
    *,
    replicas: int = 1,
    routing: Routing = "least_loaded",
    prefix_cache: bool = True,
    on_progress: Callable[[int], None] | None = None,
    on_step: OnStep | None = None,
) -> list[Outcome]:
    """Serves ``requests`` and returns what came of each, in their order.

    Every replica is an `EngineCore` over a `ClockRunner`, driven as the engine process drives its core: requests are
    taken in between two steps. Half of the model's ``request_s`` passes before a request is at its replica, the other
    half before a token is with the client. A request too long for the model fails at once.

    Args:
        replicas: engines, at least 1.
        routing: which of them gets a request: each in turn, or the one with the fewest open requests.
        on_progress: called after each request with how many have ended.
        on_step: called for every step of every replica.

    Raises:
        ValueError: no replicas, a request without tokens, or one that follows none of the others.
    """
    if replicas < 1:
        raise ValueError(f"replicas: must be at least 1, not {replicas}")
    for index, request in enumerate(requests):
        if not request.prompt or request.output_tokens < 1:
            raise ValueError(f"request {index}: prompt and output must have at least one token")
        if request.after is not None and not 0 <= request.after < len(requests):
            raise ValueError(f"request {index}: there is no request {request.after} that it could follow")
    cores = [_Replica(number, model, prefix_cache, on_step) for number in range(replicas)]
    return _Simulation(requests, model, cores, routing, on_progress).run()


def virtual_core(model: GpuModel, *, prefix_cache: bool, on_step: OnStep | None) -> tuple[EngineCore, VirtualClock]:
    """An engine whose steps take no time but that of its clock, and this clock; ``on_step`` as in `simulate`."""
    sizes, clock = model.engine, VirtualClock()
    groups = [KVGroup(None, sizes.num_blocks)]
    scheduler = Scheduler(
        groups,
        block_size=sizes.block_size,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_num_seqs=sizes.max_num_seqs,
        max_rows=2 * sizes.max_num_seqs,
        max_model_len=sizes.max_model_len,
        eos_ids=(),
        prefix_cache=prefix_cache,
        clock=clock.now,
    )
    runner = ClockRunner(model.step_time, clock, groups, sizes.block_size, range(1), on_step)
    return EngineCore(scheduler, runner, sizes.depth, Limits(1, sizes.max_model_len)), clock


class _Replica:
    def __init__(self, number: int, model: GpuModel, prefix_cache: bool, on_step: OnStep | None) -> None:
        self.number = number
        self.core, self.clock = virtual_core(model, prefix_cache=prefix_cache, on_step=on_step)
        self._open = 0
        self._ends: deque[float] = deque()

    def begin(self) -> None:
        self._open += 1

    def end(self) -> None:
        self._ends.append(self.clock.now())

    def open_at(self, now: float) -> int:
        """Requests here that have not ended by then; the replica itself may be a step ahead of that."""
        while self._ends and self._ends[0] <= now:
            self._ends.popleft()
            self._open -= 1
        return self._open


class _Simulation:
    def __init__(
        self,
        requests: Sequence[SimulatedRequest],
        model: GpuModel,
        replicas: list[_Replica],
        routing: Routing,
        on_progress: Callable[[int], None] | None,
    ) -> None:
        self._requests = requests
        self._most = model.engine.max_model_len
        self._way_s = model.request_s / 2
        self._replicas = replicas
        self._routing = routing
        self._on_progress = on_progress
        self._outcomes = [Outcome() for _ in requests]
        self._ended = self._routed = 0
        self._followers: dict[int, list[int]] = {}
        for index, request in enumerate(requests):
            if request.after is not None:
                self._followers.setdefault(request.after, []).append(index)
        self._arrivals: list[tuple[float, int]] = []
        """Heap of (time at the replica, index)."""

    def run(self) -> list[Outcome]:
        for index, request in enumerate(self._requests):
            if request.after is None:
                self._send(index, request.due)
        arrivals = self._arrivals
        while True:
            # The replica that is furthest behind goes first, so that nothing it brings comes too late for the others.
            busy = [replica for replica in self._replicas if replica.core.has_work]
            replica = min(busy, key=lambda each: each.clock.now(), default=None)
            if arrivals and (replica is None or arrivals[0][0] <= replica.clock.now()):
                self._route(*heapq.heappop(arrivals))
            elif replica is not None:
                self._step(replica)
            else:
                return self._outcomes

    def _send(self, index: int, due: float) -> None:
        request, outcome = self._requests[index], self._outcomes[index]
        outcome.due = due
        if len(request.prompt) + request.output_tokens <= self._most:
            heapq.heappush(self._arrivals, (due + self._way_s, index))
        else:
            self._fail(index, f"prompt and output exceed the context of {self._most} tokens")

    def _fail(self, index: int, error: str) -> None:
        self._outcomes[index].error = error
        self._count()
        for follower in self._followers.get(index, ()):
            self._fail(follower, "the request that it follows failed")

    def _count(self) -> None:
        self._ended += 1
        if self._on_progress is not None:
            self._on_progress(self._ended)

    def _route(self, now: float, index: int) -> None:
        if self._routing == "round_robin":
            replica = self._replicas[self._routed % len(self._replicas)]
        else:
            replica = min(self._replicas, key=lambda each: each.open_at(now))
        self._routed += 1
        self._outcomes[index].replica = replica.number
        request = self._requests[index]
        params = _params(request.output_tokens)
        if not replica.core.has_work:
            replica.clock.wait_until(now)
        replica.begin()
        replica.core.add(Request(id=index, prompt=list(request.prompt), params=params, seed=0, arrival=now))

    def _step(self, replica: _Replica) -> None:
        outputs = replica.core.step()
        token = (replica.clock.now() + self._way_s, 1)
        outcomes = self._outcomes
        for output in outputs:
            outcome = outcomes[output.request]
            if not outcome.tokens:
                assert outcome.due is not None
                outcome.scheduled = outcome.due + self._way_s + output.queued_s
                outcome.cached_tokens = output.cached_tokens
            outcome.tokens.append(token)
            if output.finish is not None:
                replica.end()
                self._count()
                for follower in self._followers.get(output.request, ()):
                    self._send(follower, token[0] + self._requests[follower].due)


@lru_cache(maxsize=4096)
def _params(output_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=output_tokens, ignore_eos=True)


def trace_prompt(index: int, tokens: int, blocks: Sequence[int] = (), block_tokens: int = 0) -> list[int]:
    """Token ids that equal those of another prompt where the blocks do, and nowhere else.

    Args:
        index: of the request.
        tokens: in the prompt, at least 1.
        blocks: ids of its blocks, from 0 on; the last is cut to the prompt's length.
        block_tokens: in a block.
    """
    prompt = [block for block in blocks for _ in range(block_tokens)][:tokens]
    return prompt + [-1 - index] * (tokens - len(prompt))
