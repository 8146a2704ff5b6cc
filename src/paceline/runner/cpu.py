"""Runs steps on the CPU."""

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from paceline.checkpoint.checkpoint import Checkpoint
from paceline.engine.config import EngineConfig, InvalidConfig
from paceline.engine.limits import Limits
from paceline.engine.sizes import Sizes
from paceline.engine.step import KVGroup, Step, StepResult
from paceline.kernels.logprobs import LOGPROB_ROWS, token_logprobs
from paceline.kernels.penalties import SeenTokens, TokenCounts
from paceline.kernels.sampling import SamplingBatch, sample
from paceline.layers.attention import AttentionBatch
from paceline.models.decoder import Decoder
from paceline.models.loader import load_decoder
from paceline.models.registry import decoder_spec
from paceline.runner.kv_capacity import MIB, kv_capacity
from paceline.runner.logprob_lists import logprob_lists
from paceline.runner.memory import available_memory
from paceline.runner.reasons import NOT_FINITE, NOTHING_ALLOWED
from paceline.runner.rows import Chunks, Ints, Rows
from paceline.runner.sampling_rows import sampling_batch

log = logging.getLogger(__name__)

THREADS_PER_CORE = 4
"""Far more than help; thousands would end the process."""


class CPURunner:
    """Loads a model and carries out steps, one after the other, in a thread of its own.

    Attributes:
        sizes: the knobs that depend on the device.
        spec: shape of the decoder.
        limits: what requests may ask for.
        kv_groups: KV groups with their capacity.
        kv_layout: what a block of each group takes.
    """

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        progress: Callable[[str, float], None] | None = None,
        *,
        decoder: Decoder | None = None,
    ) -> None:
        """Loads the weights, then takes the memory for keys and values.

        Args:
            progress: told what is being done and the share of it that is done.
            decoder: the checkpoint's weights, where they are loaded already.

        Raises:
            CheckpointError: the checkpoint is broken or not supported.
            InvalidConfig: the KV cache is too small for ``max_model_len``, or the machine for ``threads`` or
                ``max_num_seqs``.
        """
        if config.nvtx:
            raise InvalidConfig("nvtx: there is nothing to mark on a CPU")
        threads = _threads(config)
        self.spec = decoder_spec(checkpoint.config)
        dtype = getattr(torch, config.dtype if config.dtype != "auto" else checkpoint.dtype or "float32")
        self._vocab_limit = min(self.spec.vocab_size, checkpoint.tokenizer().vocab_size)
        self._decoder = decoder or load_decoder(
            checkpoint,
            dtype=dtype,
            device="cpu",
            kv_dtype=torch.float8_e4m3fn if config.kv_cache_dtype == "fp8" else None,
            load_format=config.load_format,
            quantization=config.quantization,
            progress=progress,
        )
        self.sizes = sizes = Sizes.of(config, "cpu")
        self.kv_layout = self._decoder.kv_layout(sizes.block_size)
        available = available_memory()
        capacity = kv_capacity(config, sizes, self.kv_layout, self.spec.max_position, available)
        self.limits = Limits(self.spec.vocab_size, capacity.max_model_len)
        self.kv_groups = [KVGroup(window, capacity.num_blocks) for window in self.spec.kv_windows]
        self._cache = self._decoder.make_cache(self.kv_layout, [capacity.num_blocks] * len(self.kv_groups))
        self._rows = Rows(sizes.max_rows, capacity.max_model_len, sizes.block_size, len(self.kv_groups))
        self._counts = TokenCounts(self.spec.vocab_size)
        self._slots: dict[int, int] = {}  # penalised row -> slot in _counts
        self._sampling: tuple[Ints, SamplingBatch] | None = None  # what was built last, and for which rows
        self._broken: BaseException | None = None
        self._worker = ThreadPoolExecutor(1, "paceline-runner", torch.set_num_threads, (threads,))
        weights = sum(weight.nbytes for weight in self._decoder.parameters())
        log.info(
            "%s on the CPU with %d threads: weights %.0f MiB (%s), KV cache %.0f MiB for %d tokens, %.0f MiB left",
            checkpoint.name,
            threads,
            weights / MIB,
            str(dtype).removeprefix("torch."),
            capacity.bytes / MIB,
            (capacity.num_blocks - 1) * sizes.block_size,
            (available - capacity.bytes) / MIB,
        )

    def submit(self, step: Step) -> Future[StepResult]:
        """Queues the step, which belongs to the runner from now on."""
        return self._worker.submit(self._run, step)

    def idle(self) -> bool:
        return False

    def close(self) -> None:
        """Ends the thread and frees weights and cache."""
        self._worker.shutdown()
        del self._decoder, self._cache

    def _run(self, step: Step) -> StepResult:
        if self._broken is not None:
            raise RuntimeError("an earlier step failed, all rows are lost") from self._broken
        try:
            with torch.inference_mode():
                return self._compute(step)
        except BaseException as error:
            self._broken = error
            raise

    def _compute(self, step: Step) -> StepResult:
        chunks = self._rows.apply(step)
        self._track_penalties(step)
        result = StepResult()
        if len(chunks.positions) == 0:
            return result
        hidden = self._forward(chunks)
        self._score_prompts(chunks, hidden, result)
        self._sample(chunks, hidden, result)
        return result

    def _track_penalties(self, step: Step) -> None:
        for row in step.removed:
            if row in self._slots:
                self._counts.release(self._slots.pop(row))
        for start in step.added:
            if start.params.penalises:
                self._slots[start.row] = self._counts.acquire(start.tokens, start.prompt_len)
        if step.added:
            self._sampling = None

    def _forward(self, chunks: Chunks) -> Tensor:
        """Hidden states of the step's tokens, ``[T, hidden]``."""
        rows = self._rows
        tokens = rows.tokens[chunks.token_rows, chunks.positions]
        batch = AttentionBatch(
            query_start=torch.from_numpy(chunks.query_start),
            context_len=torch.from_numpy(chunks.context_len),
            positions=torch.from_numpy(chunks.positions),
            token_rows=torch.from_numpy(chunks.token_index),
            block_tables=tuple(map(torch.from_numpy, rows.block_tables(chunks))),
            single_rows=chunks.single_rows,
            max_query_len=chunks.max_query_len,
            max_context=chunks.max_context,
        )
        return self._decoder.forward(torch.from_numpy(tokens), batch, self._cache)

    def _score_prompts(self, chunks: Chunks, hidden: Tensor, result: StepResult) -> None:
        """Log-probabilities of prompt tokens: the state at a position predicts the token after it."""
        for found in self._rows.prompt_parts(chunks):
            states = hidden[found.start :][: len(found.ids)]
            ids = torch.from_numpy(found.ids)
            entries = []
            for part, targets in zip(states.split(LOGPROB_ROWS), ids.split(LOGPROB_ROWS), strict=True):
                logprobs = token_logprobs(self._decoder.logits(part), targets, found.top, self._vocab_limit)
                entries += logprob_lists(logprobs, [found.top] * len(targets))
            result.prompt_logprobs[found.row] = (found.first, entries)

    def _sample(self, chunks: Chunks, hidden: Tensor, result: StepResult) -> None:
        last = np.nonzero(chunks.context_len == self._rows.length[chunks.rows])[0]
        if len(last) == 0:
            return
        rows = chunks.rows[last]
        logits = self._decoder.logits(hidden[torch.from_numpy(chunks.query_start[last + 1] - 1)])
        positions = torch.from_numpy(self._rows.length[rows])
        sampled = sample(logits, self._sampling_of(rows), positions, self._seen(rows))
        good = (sampled.finite & sampled.possible).numpy()
        if not good.all():
            for row, finite in zip(rows[~good].tolist(), sampled.finite[~good].tolist(), strict=True):
                result.errors[row] = NOTHING_ALLOWED if finite else NOT_FINITE
                self._rows.fail(row)
        result.rows = rows[good].tolist()
        result.counts = [1] * len(result.rows)
        ids = sampled.ids.numpy()[good]
        result.ids = ids.tolist()
        self._rows.append(rows[good], ids)
        self._count(result.rows, result.ids)
        self._report(result, logits, good)

    def _sampling_of(self, rows: Ints) -> SamplingBatch:
        if self._sampling is None or not np.array_equal(self._sampling[0], rows):
            starts = [self._rows.starts[row] for row in rows.tolist()]
            self._sampling = (rows, sampling_batch(starts, self._vocab_limit))
        return self._sampling[1]

    def _seen(self, rows: Ints) -> SeenTokens | None:
        """What stands in those of ``rows`` that are penalised."""
        if not self._slots:
            return None
        entries = []
        for index, row in enumerate(rows.tolist()):
            if row in self._slots:
                ids = self._rows.tokens[row, : self._rows.length[row]]
                entries.append(np.stack([np.full_like(ids, index), np.full_like(ids, self._slots[row]), ids]))
        return self._counts.look_up(*torch.from_numpy(np.concatenate(entries, 1))) if entries else None

    def _count(self, rows: list[int], ids: list[int]) -> None:
        """Remembers sampled tokens of penalised rows."""
        seen = [(self._slots[row], token) for row, token in zip(rows, ids, strict=True) if row in self._slots]
        if seen:
            slots, tokens = torch.tensor(seen).unbind(1)
            self._counts.add(slots, tokens)

    def _report(self, result: StepResult, logits: Tensor, good: np.ndarray) -> None:
        """Log-probabilities of sampled tokens, where asked for."""
        tops = [self._rows.starts[row].params.logprobs for row in result.rows]
        asked = [(index, top) for index, top in enumerate(tops) if top is not None]
        if not asked:
            return
        chosen = [index for index, _ in asked]
        ids = torch.tensor([result.ids[index] for index in chosen])
        logits = logits[torch.from_numpy(np.nonzero(good)[0][chosen])]
        logprobs = token_logprobs(logits, ids, max(top for _, top in asked), self._vocab_limit)
        lists = logprob_lists(logprobs, [top for _, top in asked])
        for index, entry in zip(chosen, lists, strict=True):
            result.logprobs[result.rows[index]] = [entry]


def _threads(config: EngineConfig) -> int:
    cores = os.cpu_count() or 1
    if config.threads is not None and config.threads > THREADS_PER_CORE * cores:
        raise InvalidConfig(f"threads: {config.threads} are more than {THREADS_PER_CORE} for each of {cores} cores")
    return config.threads or len(os.sched_getaffinity(0))
