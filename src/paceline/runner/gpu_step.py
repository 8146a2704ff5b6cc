"""A step under way on a GPU: what comes back of it, and when."""

from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from paceline.engine.step import StepResult
from paceline.kernels.logprobs import Logprobs
from paceline.runner.device_sampler import Samples
from paceline.runner.logprob_lists import logprob_lists
from paceline.runner.reasons import NOT_FINITE, NOTHING_ALLOWED
from paceline.runner.rows import Ints, PromptPart

_REASONS = {1: NOT_FINITE, 2: NOTHING_ALLOWED}


class GPUStep:
    """Filled by the runner while it launches, then `launched`. Copies go over a stream of their own, so that the next
    step does not wait for them. A step that is never launched computes nothing."""

    def __init__(self, copies: torch.cuda.Stream) -> None:
        self._copies = copies
        self._done: torch.cuda.Event | None = None
        self._rows: Ints | None = None
        self._ids: Tensor | None = None
        self._status: Tensor | None = None
        self._asked: list[int] = []
        self._tops: list[int] = []
        self._logprobs: Logprobs | None = None
        self._prompts: list[tuple[PromptPart, list[Logprobs]]] = []
        self._copied: list[tuple[Tensor, Tensor]] = []  # (from, to)

    def take(self, rows: Ints, samples: Samples, tops: Sequence[int | None]) -> None:
        """What was sampled; ``tops``: alternatives that each row asked for, if any row did."""
        self._rows = rows
        self._ids, self._status = self._host(samples.ids), self._host(samples.status)
        if samples.logprobs is not None:
            indices, logprobs = samples.logprobs
            self._asked = indices.tolist()
            self._tops = [top for index in self._asked if (top := tops[index]) is not None]
            self._logprobs = self._host_logprobs(logprobs)

    def score(self, where: PromptPart, parts: list[Logprobs]) -> None:
        """Log-probabilities of a part of a prompt."""
        self._prompts.append((where, [self._host_logprobs(part) for part in parts]))

    def launched(self) -> None:
        """Starts the copies: everything that they read has been launched."""
        self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            for source, target in self._copied:
                target.copy_(source, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()

    def result(self) -> StepResult:
        """Waits for the copies."""
        result = StepResult()
        if self._done is None:
            return result
        self._done.synchronize()
        for where, parts in self._prompts:
            entries = [entry for part in parts for entry in logprob_lists(part, [where.top] * len(part.rank))]
            result.prompt_logprobs[where.row] = (where.first, entries)
        if self._rows is None or self._ids is None or self._status is None:
            return result
        rows, ids, status = self._rows.tolist(), self._ids.tolist(), self._status.tolist()
        if any(status):
            result.errors = {row: _REASONS[code] for row, code in zip(rows, status, strict=True) if code}
        result.rows = [row for row, code in zip(rows, status, strict=True) if not code]
        result.ids = [id for id, code in zip(ids, status, strict=True) if not code]
        result.counts = [1] * len(result.rows)
        if self._logprobs is not None:
            entries = logprob_lists(self._logprobs, self._tops)
            for index, entry in zip(self._asked, entries, strict=True):
                if not status[index]:
                    result.logprobs[rows[index]] = [entry]
        return result

    def _host(self, source: Tensor) -> Tensor:
        target = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        self._copied.append((source, target))
        return target

    def _host_logprobs(self, logprobs: Logprobs) -> Logprobs:
        return Logprobs(**{field.name: self._host(getattr(logprobs, field.name)) for field in fields(logprobs)})
