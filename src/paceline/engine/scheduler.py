"""Decides what every step computes. Knows tokens, blocks and rows, and nothing of devices."""

import heapq
import time
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from paceline.engine.config import InvalidConfig
from paceline.engine.kv_manager import KVManager
from paceline.engine.request import CoreOutput, CoreStats, Finish, Request
from paceline.engine.sequence import Sequence
from paceline.engine.step import KVGroup, RowStart, Step, StepResult, TokenLogprobs

GROWTH_TOKENS = 64
"""Admission leaves every running sequence room to grow by this much, or a newcomer would soon be preempted again."""

LOOK_PAST = 32
"""Waiting sequences tried behind one that does not fit, and newcomers let past it before it blocks the queue."""


@dataclass(slots=True)
class Seat:
    """One row's part in a step, kept until the step is committed."""

    sequence: Sequence
    life: int
    computed: int
    """Of the sequence, after the step."""
    samples: bool


@dataclass(slots=True)
class Scheduled:
    """A step on its way, with what is needed to commit it."""

    step: Step
    seats: dict[int, Seat] = field(default_factory=dict)


class Scheduler:
    """Continuous batching over one token budget.

    Each step serves, in this order: running sequences that need one token; running sequences with more tokens to
    compute, in chunks of what the budget leaves; waiting sequences, as long as budget, rows and blocks last. Order
    within each is priority, then arrival. When a running sequence finds no block, the last in order is preempted: it
    gives back its blocks, waits, and computes its tokens again later; the first in order always makes progress.

    `schedule` may be called again before earlier steps are committed. A token that a step under way will sample is
    then *pending*: it has a position and a block, but no id on the host.
    """

    def __init__(
        self,
        groups: Seq[KVGroup],
        *,
        block_size: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_rows: int,
        max_model_len: int,
        eos_ids: Seq[int],
        prefix_cache: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if min(max_num_batched_tokens, max_num_seqs, block_size) < 1 or max_rows < max_num_seqs:
            raise ValueError("token budget, sequences and block size must be at least 1, rows at least the sequences")
        self.kv = KVManager(groups, block_size, prefix_cache)
        if not self.kv.fits_empty(max_model_len):
            raise InvalidConfig(
                f"the KV cache cannot hold one sequence of max_model_len={max_model_len}: "
                "give it more memory or lower max_model_len"
            )
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.max_rows = max_rows
        self.max_model_len = max_model_len
        self.eos_ids = frozenset(eos_ids)
        self._clock = clock
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.requests: dict[int, list[Sequence]] = {}
        """Sequences of each live request that have not finished."""
        self.stats = CoreStats()
        self._free_rows = list(range(max_rows))
        self._leaving: list[int] = []
        """Rows given up since the last step."""
        self._under_way = 0
        self._leaders: dict[int, Sequence] = {}
        """Candidate 0 of requests with more candidates: it computes the prompt that the others share."""

    # From the front

    def add(self, request: Request) -> None:
        assert request.id not in self.requests, f"request {request.id} exists already"
        params = request.params
        prompt_len = len(request.prompt)
        assert 0 < prompt_len <= self.max_model_len, "the front lets no such prompt through"
        limit = self.max_model_len
        if params.max_tokens is not None:
            limit = min(limit, prompt_len + params.max_tokens)
        sequences = [Sequence(request, i, limit, list(request.prompt)) for i in range(params.n)]
        self.requests[request.id] = sequences
        if params.n > 1:
            self._leaders[request.id] = sequences[0]
        for sequence in sequences:
            insort(self.waiting, sequence, key=_order)

    def abort(self, request: int, candidate: int | None = None) -> None:
        """Ends a request, or one candidate of it, without an output. Does nothing where it has ended already."""
        for sequence in list(self.requests.get(request, ())):
            if candidate is None or sequence.candidate == candidate:
                self._finish(sequence, Finish.ABORT)

    # To the runner

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self._leaving or self._under_way)

    def schedule(self) -> Scheduled | None:
        """The next step, or None while there is nothing that a step could do."""
        scheduled = Scheduled(Step(self.stats.steps))
        step = scheduled.step
        self._yield_to_priority()
        budget = self._schedule_running(scheduled, self.max_num_batched_tokens)
        self._schedule_waiting(scheduled, budget)
        if not scheduled.seats and (self._under_way or not self._leaving):
            return None
        step.removed, self._leaving = self._leaving, []
        for sequence in self.running:
            assert sequence.row is not None
            if sequence.row not in scheduled.seats:
                step.advance[sequence.row] = 0
        self.stats.steps += 1
        self._under_way += 1
        return scheduled

    def commit(self, scheduled: Scheduled, result: StepResult) -> list[CoreOutput]:
        """Takes in what a step produced. Steps are committed in the order in which they were scheduled."""
        self._under_way -= 1
        for row in scheduled.step.removed:
            heapq.heappush(self._free_rows, row)
        sampled = dict(zip(result.rows, _split(result.ids, result.counts), strict=True))
        outputs = []
        for row, seat in scheduled.seats.items():
            output = self._commit_seat(
                seat,
                sampled.get(row, ()),
                result.logprobs.get(row),
                result.prompt_logprobs.get(row),
                result.errors.get(row),
            )
            if output is not None:
                outputs.append(output)
        if any(output.finish for output in outputs):
            self.running = [sequence for sequence in self.running if sequence.finish is None]
        return outputs

    def snapshot(self) -> CoreStats:
        """The counters so far, and what is held now."""
        return replace(self.stats, running=len(self.running), waiting=len(self.waiting), kv_used=self.kv.used)

    def check_idle(self) -> None:
        """Asserts that nothing is left of any request."""
        assert not self.has_work, "not idle"
        assert not self.requests, "a request was never forgotten"
        assert not self._leaders, "a request was never forgotten"
        assert sorted(self._free_rows) == list(range(self.max_rows)), "a row was never given back"
        self.kv.check_idle()

    # Scheduling

    def _schedule_running(self, scheduled: Scheduled, budget: int) -> int:
        """Gives running sequences their tokens; returns what is left of the budget."""
        chunks = []
        for sequence in list(self.running):
            if sequence.row is None or budget == 0:  # preempted by one before it
                continue
            remaining = sequence.remaining
            if remaining > 1:
                chunks.append(sequence)
            elif remaining == 1 and self._make_room(sequence, scheduled.step):
                budget -= self._seat(sequence, 1, scheduled)
        for sequence in chunks:
            if sequence.row is not None and budget > 0:
                budget -= self._seat(sequence, min(sequence.remaining, budget), scheduled)
        return budget

    def _make_room(self, sequence: Sequence, step: Step) -> bool:
        """Finds a block for the sequence's next token if it needs one. False: it was preempted itself."""
        missing = self.kv.missing_blocks(sequence, sequence.computed + 1)
        if missing <= 0:
            return True
        while not self.kv.can_grow(missing):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        assert sequence.row is not None
        step.blocks[sequence.row] = self.kv.grow(sequence, missing)
        return True

    def _schedule_waiting(self, scheduled: Scheduled, budget: int) -> None:
        if not self.waiting:
            return
        tried = 0
        blocked: list[Sequence] = []
        admitted: list[Sequence] = []
        headroom = self._headroom(self.running)
        for sequence in self.waiting:
            if budget == 0 or len(self.running) == self.max_num_seqs or not self._free_rows or tried == LOOK_PAST:
                break
            if not self._ready(sequence):
                continue
            hit = self.kv.find_prefix(sequence)
            if not self.kv.can_admit(sequence, hit, headroom):
                blocked.append(sequence)
                tried += 1
                if sequence.passed_over >= LOOK_PAST:
                    break
                continue
            for earlier in blocked:
                earlier.passed_over += 1
            admitted.append(sequence)
            self._admit(sequence, hit, scheduled.step)
            headroom += self._growth(sequence)
            budget -= self._seat(sequence, min(sequence.remaining, budget), scheduled)
        if admitted:
            self.waiting = [sequence for sequence in self.waiting if sequence.row is None]

    def _admit(self, sequence: Sequence, hit: int, step: Step) -> None:
        request = sequence.request
        self.kv.admit(sequence, hit)
        sequence.row = heapq.heappop(self._free_rows)
        sequence.life += 1
        sequence.passed_over = 0
        if not sequence.admitted:
            sequence.admitted = True
            sequence.queued_s = self._clock() - request.arrival
            sequence.cached_tokens = min(sequence.computed, sequence.prompt_len)
            if self.kv.prefix_cache:
                self.stats.prefix_queries += sequence.prompt_len
                self.stats.prefix_hits += sequence.cached_tokens
        insort(self.running, sequence, key=_order)
        params = request.params
        step.added.append(
            RowStart(
                row=sequence.row,
                tokens=list(sequence.tokens),
                prompt_len=sequence.prompt_len,
                computed=sequence.computed,
                blocks=[list(table) for table in sequence.tables],
                params=params,
                seed=request.seed,
                candidate=sequence.candidate,
                stop_ids=[*params.stop_token_ids, *(() if params.ignore_eos else self.eos_ids)],
                prompt_logprobs=params.prompt_logprobs if sequence.wants_prompt_logprobs else None,
            )
        )

    def _seat(self, sequence: Sequence, count: int, scheduled: Scheduled) -> int:
        """Lets the sequence compute ``count`` tokens in this step; its blocks are there already."""
        assert sequence.row is not None
        self.kv.leave_window(sequence)
        sequence.computed += count
        samples = sequence.computed == sequence.length
        scheduled.seats[sequence.row] = Seat(sequence, sequence.life, sequence.computed, samples)
        if count != 1:
            scheduled.step.advance[sequence.row] = count
        sequence.pending += samples
        self.stats.step_tokens += count
        return count

    def _ready(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence could run: all its tokens are known here, and the prompt that it is to share with
        its siblings is computed."""
        if sequence.pending:
            return False
        leader = self._leaders.get(sequence.request.id, sequence)
        return leader is sequence or leader.prompt_done or leader.finish is not None

    def _growth(self, sequence: Sequence) -> int:
        """Blocks that the sequence will soon want beyond those it has."""
        soon = min(sequence.length + GROWTH_TOKENS, sequence.limit)
        return max(0, self.kv.missing_blocks(sequence, soon))

    def _headroom(self, sequences: Seq[Sequence]) -> int:
        return sum(self._growth(sequence) for sequence in sequences)

    def _yield_to_priority(self) -> None:
        """Preempts running sequences for a waiting one of strictly better priority, if that is enough to admit it."""
        urgent = next((sequence for sequence in self.waiting if self._ready(sequence)), None)
        if urgent is None or not self.running:
            return
        keep = bisect_right(self.running, urgent.request.priority, key=lambda sequence: sequence.request.priority)
        victims = self.running[keep:]
        if not victims or not self._free_rows:
            return
        hit = self.kv.find_prefix(urgent)
        if not self.kv.can_admit(urgent, hit, self._headroom(self.running[:keep]), victims):
            return
        while victims:
            has_seat = len(self.running) < self.max_num_seqs
            if has_seat and self.kv.can_admit(urgent, hit, self._headroom(self.running)):
                return
            self._preempt(victims.pop())

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence)
        self.running.remove(sequence)
        sequence.computed = sequence.committed = 0
        sequence.life += 1
        insort(self.waiting, sequence, key=_order)
        self.stats.preemptions += 1

    def _leave(self, sequence: Sequence) -> None:
        """The one way in which a sequence gives up its row and blocks."""
        assert sequence.row is not None
        self._leaving.append(sequence.row)
        sequence.row = None
        self.kv.release(sequence)

    def _finish(self, sequence: Sequence, why: Finish) -> None:
        if sequence.finish is not None:
            return
        sequence.finish = why
        if sequence.row is not None:
            self._leave(sequence)
            if why is Finish.ABORT:
                self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        siblings = self.requests[sequence.request.id]
        siblings.remove(sequence)
        if not siblings:
            del self.requests[sequence.request.id]
            self._leaders.pop(sequence.request.id, None)

    # Committing

    def _commit_seat(
        self,
        seat: Seat,
        ids: Seq[int],
        logprobs: list[TokenLogprobs] | None,
        prompt_logprobs: tuple[int, list[TokenLogprobs]] | None,
        error: str | None,
    ) -> CoreOutput | None:
        sequence = seat.sequence
        sequence.pending -= seat.samples
        if sequence.finish is not None:
            return None
        if prompt_logprobs is not None:
            first, entries = prompt_logprobs
            known = len(sequence.prompt_logprobs) + 1
            sequence.prompt_logprobs.extend(entries[max(0, known - first) :])
        if error is not None:
            self._finish(sequence, Finish.ERROR)
            return self._output(sequence, [], None, error=error)
        assert bool(ids) == seat.samples, "a row samples exactly when it has computed all its tokens"
        kept, stop_id = self._append(sequence, ids) if seat.samples else (0, None)
        if sequence.life == seat.life:
            sequence.committed = seat.computed
            sequence.prompt_done = sequence.prompt_done or sequence.committed >= sequence.prompt_len
            self.kv.publish(sequence)
        if not seat.samples:
            return None
        if stop_id is not None:
            self._finish(sequence, Finish.STOP)
        elif len(sequence.tokens) >= sequence.limit:
            self._finish(sequence, Finish.LENGTH)
        return self._output(sequence, list(ids[:kept]), logprobs[:kept] if logprobs is not None else None, stop_id)

    def _append(self, sequence: Sequence, ids: Seq[int]) -> tuple[int, int | None]:
        """Appends sampled tokens up to a stop or the limit; returns how many, and the id that stopped it."""
        params = sequence.request.params
        room = sequence.limit - len(sequence.tokens)
        for count, token in enumerate(ids[:room], 1):
            sequence.tokens.append(token)
            if token in params.stop_token_ids or (token in self.eos_ids and not params.ignore_eos):
                return count, token
        return min(room, len(ids)), None

    def _output(
        self,
        sequence: Sequence,
        ids: list[int],
        logprobs: list[TokenLogprobs] | None,
        stop_id: int | None = None,
        error: str = "",
    ) -> CoreOutput:
        first = not sequence.reported
        sequence.reported = True
        reports_prompt = first and sequence.candidate == 0 and sequence.request.params.prompt_logprobs is not None
        return CoreOutput(
            request=sequence.request.id,
            candidate=sequence.candidate,
            ids=ids,
            logprobs=logprobs,
            prompt_logprobs=sequence.prompt_logprobs if reports_prompt else None,
            finish=sequence.finish,
            stop_id=stop_id,
            error=error,
            cached_tokens=sequence.cached_tokens if first else 0,
            queued_s=sequence.queued_s if first else 0.0,
        )


def _order(sequence: Sequence) -> tuple[int, float, int, int]:
    return sequence.order


def _split(ids: Seq[int], counts: Seq[int]) -> Iterator[Seq[int]]:
    start = 0
    for count in counts:
        yield ids[start : start + count]
        start += count
