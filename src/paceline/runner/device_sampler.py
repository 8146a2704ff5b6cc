"""Samples on a GPU: the parameters of every seated row stay on the device, and the host waits for nothing."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.engine.sampling_params import MAX_COUNT, SamplingParams
from paceline.engine.step import RowStart
from paceline.kernels.logprobs import LOGPROB_ROWS, Logprobs, token_logprobs
from paceline.kernels.triton.sampling import sample
from paceline.kernels.triton.seats import RECORD, SeatTable
from paceline.kernels.triton.token_notes import write_notes
from paceline.kernels.upload import upload
from paceline.runner.sampling_rows import banned_ids, filters, known_ids


@dataclass(frozen=True, slots=True)
class Samples:
    """Outcome of n rows; tensors on the device."""

    ids: Tensor
    """int32 ``[n]``; 0 where the status is not 0."""
    status: Tensor
    """int32 ``[n]``: 0 fine, 1 the logits are not finite, 2 nothing may be sampled."""
    logprobs: tuple[NDArray[np.int64], Logprobs] | None
    """Which of the n rows asked for log-probabilities, and these, with as many alternatives as any of them asked for.
    They mean nothing where the status is not 0."""


class DeviceSampler:
    """Sampling state of all seated rows, on the device. All calls are made on the same stream.

    A row with penalties or ``min_tokens`` holds 4 bytes a token of the vocabulary while it is seated, and one with
    ``logit_bias`` or ``allowed_token_ids`` as much again. Memory of rows that left is kept for later ones.
    """

    def __init__(self, max_rows: int, vocab_size: int, vocab_limit: int, device: torch.device) -> None:
        """
        Args:
            max_rows: row ids are below this. Seat ``max_rows`` is never taken: padding may name it.
            vocab_size: ids of prompts are below this.
            vocab_limit: ids from here on are padding of the head and are never sampled.
        """
        self._vocab_size = vocab_size
        self._vocab_limit = vocab_limit
        self._device = device
        self._table = SeatTable(max_rows + 1, device)
        self._filters = np.zeros(max_rows + 1, bool)
        self._reports = np.zeros(max_rows + 1, bool)
        self._tops = np.zeros(max_rows + 1, np.int64)
        self._notes = _Pool(vocab_size, torch.int32, device)
        self._biases = _Pool(vocab_size, torch.float32, device)

    @property
    def last_token(self) -> Tensor:
        """int32 ``[max_rows + 1]``: what each row sampled last."""
        return self._table.last_token

    def most_bytes(self, rows: int) -> int:
        """Memory that so many rows hold beyond what is held already, if all of them do."""
        return rows * self._vocab_size * (torch.int32.itemsize + torch.float32.itemsize)

    def seat(self, starts: Sequence[RowStart]) -> None:
        """Rows take their seats, or take them again after a preemption."""
        if not starts:
            return
        rows = [start.row for start in starts]
        records = np.zeros(len(starts), RECORD)
        noted = []
        for record, start in zip(records, starts, strict=True):
            row, params = start.row, start.params
            self._reports[row] = params.logprobs is not None
            self._tops[row] = params.logprobs or 0
            self._filters[row] = not params.greedy and filters(params, self._vocab_limit)
            record["seed"] = start.seed
            record["candidate"] = start.candidate
            record["temperature"] = 0.0 if params.greedy else params.temperature
            if self._filters[row]:
                record["top_k"] = params.top_k if 0 < params.top_k < self._vocab_limit else self._vocab_limit
                record["top_p"] = params.top_p if params.top_p < 1 else math.inf
                record["min_p"] = params.min_p
            banned = banned_ids(start, self._vocab_limit)
            if params.penalises or banned:
                notes = self._notes.take(row)
                noted.append((notes, (start.tokens[: start.prompt_len], banned, start.tokens[start.prompt_len :])))
                record["notes"] = notes.data_ptr()
                record["presence"] = params.presence_penalty
                record["frequency"] = params.frequency_penalty
                record["repetition"] = params.repetition_penalty
                record["until"] = min(start.prompt_len + params.min_tokens, MAX_COUNT)
            if params.logit_bias or params.allowed_token_ids:
                record["bias"] = self._write_bias(start).data_ptr()
        self._table.write(rows, records)
        if noted:
            write_notes(*zip(*noted, strict=True))

    def release(self, rows: Sequence[int]) -> None:
        """Rows leave their seats; no later call names them until they are seated again."""
        for row in rows:
            self._filters[row] = self._reports[row] = False
            self._notes.give(row)
            self._biases.give(row)

    def filters(self, rows: NDArray[np.int64]) -> bool:
        """Whether any of ``rows`` has top_k, top_p or min_p."""
        return bool(self._filters[rows].any())

    def sample(self, logits: Tensor, rows: NDArray[np.int64], device_rows: Tensor, positions: Tensor) -> Samples:
        """Chooses the next token of n rows, without a look at the device.

        Args:
            logits: ``[n or more, V]``, bfloat16, float16 or float32; what follows the first n rows is not read.
            rows: the n rows, each once.
            device_rows: int32 ``[n]``: the same on the device.
            positions: int32 ``[n]``: where the sampled token will stand.
        """
        logits = logits[: len(rows)]
        ids, status = self.draw(logits, device_rows, positions, filters=self.filters(rows))
        return Samples(ids, status, self.logprobs(logits, rows, ids))

    def draw(self, logits: Tensor, device_rows: Tensor, positions: Tensor, *, filters: bool) -> tuple[Tensor, Tensor]:
        """The part of `sample` that a CUDA graph can hold: one launch, or two if ``filters``. Returns ids and status.

        ``filters`` must be True if any row filters, and may be if none does. A row of padding names seat ``max_rows``,
        and gets its greedy choice.
        """
        return sample(logits, device_rows, positions, self._table, self._vocab_limit, filters=filters)

    def logprobs(
        self, logits: Tensor, rows: NDArray[np.int64], ids: Tensor
    ) -> tuple[NDArray[np.int64], Logprobs] | None:
        """As in `Samples`, of tokens ``ids`` (int32 ``[n]``); None where none of ``rows`` asked."""
        asked = np.nonzero(self._reports[rows])[0]
        if len(asked) == 0:
            return None
        top = int(self._tops[rows[asked]].max())
        parts = [
            token_logprobs(logits[part].float(), ids[part].long(), top, self._vocab_limit)
            for part in upload(asked, self._device).split(LOGPROB_ROWS)
        ]
        columns = ("logprob", "rank", "top_ids", "top_logprobs")
        return asked, Logprobs(*(torch.cat([getattr(part, column) for part in parts]) for column in columns))

    def warm_up(self, logits: Tensor) -> None:
        """Compiles the kernels for logits like these, ``[1 or more, V]``, so that no later call waits for that."""
        seat = len(self._filters) - 1
        params = SamplingParams(top_k=2, repetition_penalty=2.0)
        self.seat([RowStart(seat, [0], 1, 0, [], params, 0, 0, [], None)])
        where = torch.full((1,), seat, dtype=torch.int32, device=self._device)
        self.draw(logits[:1], where, where, filters=True)
        self.draw(logits[:1], where, where, filters=False)
        self.release([seat])
        self._table.write([seat], np.zeros(1, RECORD))

    def _write_bias(self, start: RowStart) -> Tensor:
        params = start.params
        bias = self._biases.take(start.row)
        bias.fill_(-math.inf if params.allowed_token_ids else 0.0)
        if params.allowed_token_ids:
            bias.index_fill_(0, self._upload(known_ids(params.allowed_token_ids, self._vocab_limit)), 0.0)
        if params.logit_bias:
            ids = known_ids(list(params.logit_bias), self._vocab_limit)
            values = np.array([params.logit_bias[token] for token in ids], np.float32)
            bias.index_add_(0, self._upload(ids), upload(values, self._device))
        return bias

    def _upload(self, ids: Sequence[int]) -> Tensor:
        return upload(np.array(ids, np.int64), self._device)


class _Pool:
    """Vectors over the vocabulary that rows hold while they are seated."""

    def __init__(self, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._size = vocab_size
        self._dtype = dtype
        self._device = device
        self._held: dict[int, Tensor] = {}
        self._free: list[Tensor] = []

    def take(self, row: int) -> Tensor:
        """A vector ``[vocab_size]`` with anything in it, which the row holds from now on."""
        assert row not in self._held, f"row {row} is seated twice"
        if not self._free:
            self._free.append(torch.empty(self._size, dtype=self._dtype, device=self._device))
        self._held[row] = self._free.pop()
        return self._held[row]

    def give(self, row: int) -> None:
        """The row's vector, if it holds one, is free for others."""
        if row in self._held:
            self._free.append(self._held.pop(row))
