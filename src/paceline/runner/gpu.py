"""Runs steps on one GPU."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.checkpoint.checkpoint import Checkpoint
from paceline.engine.config import EngineConfig
from paceline.engine.limits import Limits
from paceline.engine.sizes import Sizes
from paceline.engine.step import KVGroup, Step
from paceline.kernels.logprobs import LOGPROB_ROWS, token_logprobs
from paceline.kernels.triton.gather_rows import gather_rows
from paceline.kernels.triton.side_by_side import side_by_side
from paceline.kernels.upload import pinned, upload
from paceline.layers.attention import AttentionBatch
from paceline.layers.gpu_linear import overlaps
from paceline.models.decoder import Decoder
from paceline.models.loader import load_decoder
from paceline.models.registry import decoder_spec
from paceline.runner.device_rows import ALIGNMENT, ON_DEVICE, DeviceRows, concatenated, places
from paceline.runner.device_sampler import DeviceSampler
from paceline.runner.gpu_step import GPUStep
from paceline.runner.graph_pool import GraphPool
from paceline.runner.graph_shapes import FIRST, LONGER, MIXED_CONTEXT, decode_shapes, mixed_shapes
from paceline.runner.kv_capacity import MIB, kv_capacity
from paceline.runner.memory import available_memory
from paceline.runner.rows import Chunks, Ints, Rows
from paceline.runner.step_graphs import Shape, StepGraphs

log = logging.getLogger(__name__)

SINGLE_ROWS = (1, 128)
LONG_ROWS = (1, 2, 4, 8, 16)
"""Numbers of rows of one token, and of long ones, at which steps that are not captured take other kernels or plans."""

GRAPH_BYTES = 7 << 19
"""What the driver keeps for one graph, at most."""


class GPURunner:
    """Loads a model and carries out steps. `submit` only launches: the host never waits for the GPU but in
    `Handle.result`.

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
        """Loads the weights, measures what steps take, takes memory for keys and values, captures the first graphs.

        Args:
            progress: told what is being done and the share of it that is done.
            decoder: the checkpoint's weights, where they are loaded already.

        Raises:
            CheckpointError: the checkpoint is broken or not supported.
            InvalidConfig: the KV cache is too small for ``max_model_len``, or the GPU for what was asked of it.
        """
        self._device = device = torch.device("cuda", torch.cuda.current_device())
        self._report = progress or (lambda stage, share: None)
        self._nvtx = config.nvtx
        self.sizes = sizes = Sizes.of(config, "cuda")
        self.spec = decoder_spec(checkpoint.config)
        dtype = getattr(torch, config.dtype if config.dtype != "auto" else checkpoint.dtype or "bfloat16")
        self._vocab_limit = min(self.spec.vocab_size, checkpoint.tokenizer().vocab_size)
        self._decoder = decoder or load_decoder(
            checkpoint,
            dtype=dtype,
            device=device,
            kv_dtype=torch.float8_e4m3fn if config.kv_cache_dtype == "fp8" else None,
            load_format=config.load_format,
            quantization=config.quantization,
            progress=progress,
        )
        self.kv_layout = self._decoder.kv_layout(sizes.block_size)
        self._pool = GraphPool(device)
        most = min(sizes.max_num_seqs, 1024)
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(device)[0]
        working = self._profile(most)
        capacity = kv_capacity(
            config,
            sizes,
            self.kv_layout,
            self.spec.max_position,
            free,
            working=working,
            host=available_memory(),
        )
        self.limits = Limits(self.spec.vocab_size, capacity.max_model_len)
        self.kv_groups = [KVGroup(window, capacity.num_blocks) for window in self.spec.kv_windows]
        self._allocate([capacity.num_blocks] * len(self.kv_groups), capacity.max_model_len)
        self._copies = torch.cuda.Stream(device)
        first = sum(1 for (size,) in self._decodes.waiting if size in FIRST or size == most)
        for index in range(first):
            self._report("capturing graphs", index / first)
            self._capture_decode()
        weights = sum(weight.nbytes for weight in self._decoder.parameters())
        log.info(
            "%s on %s: weights %.2f GiB (%s), KV cache %.2f GiB for %d tokens (%s), steps %.2f GiB, %.2f GiB left",
            checkpoint.name,
            torch.cuda.get_device_name(device),
            weights / 1024 / MIB,
            str(dtype).removeprefix("torch."),
            capacity.bytes / 1024 / MIB,
            (capacity.num_blocks - 1) * sizes.block_size,
            str(self.kv_layout.dtype).removeprefix("torch."),
            working / 1024 / MIB,
            torch.cuda.mem_get_info(device)[0] / 1024 / MIB,
        )

    def _allocate(self, num_blocks: list[int], max_model_len: int) -> None:
        """Rows, cache, graphs to be captured and the memory that they read and write."""
        sizes, device, spec = self.sizes, self._device, self.spec
        groups = len(num_blocks)
        self._cache = self._decoder.make_cache(self.kv_layout, num_blocks)
        self._rows = Rows(sizes.max_rows, max_model_len, sizes.block_size, groups)
        self._device_rows = DeviceRows(self._rows, device)
        self._sampler = DeviceSampler(sizes.max_rows, spec.vocab_size, self._vocab_limit, device)
        most = min(sizes.max_num_seqs, 1024)
        width = self._rows.tables[0].shape[1]
        self._max_context = max_model_len
        self._input = torch.zeros(3 * most, dtype=torch.int32, device=device)
        self._tokens = torch.zeros(most, dtype=torch.int32, device=device)
        self._positions = torch.zeros(most, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(most, dtype=torch.int32, device=device)
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._tables = [torch.zeros(most, width, dtype=torch.int32, device=device) for _ in range(groups)]
        self._expected = np.zeros(0, np.int32)  # what _input holds, as far as the host knows
        shapes = mixed_shapes(min(sizes.max_num_batched_tokens, max_model_len), most)
        self._decodes = StepGraphs(self._decode, decode_shapes(most), self._pool)
        self._mixes = StepGraphs(self._mix, shapes, self._pool)
        longest = max((_mixed_places(*shape)[-1].stop for shape in shapes), default=0)
        # Behind a step's input lies what the host asks to be sampled.
        self._mixed_input = torch.zeros(longest + 3 * (most + ALIGNMENT), dtype=torch.int32, device=device)

    @torch.inference_mode()
    def _profile(self, most: int) -> int:
        """Bytes that the largest steps take beside weights and KV cache; the allocator keeps them."""
        sizes, spec = self.sizes, self.spec
        tokens = sizes.max_num_batched_tokens
        groups = len(spec.kv_windows)
        before = torch.cuda.mem_get_info(self._device)[0]
        length = min(tokens, spec.max_position)
        self._allocate([1] * groups, length)
        rest = [tokens % length] if tokens % length else []
        largest_lens = [length] * (tokens // length) + rest
        # Layers of a KV group launch the same kernels.
        kinds = [layer.group for layer in spec.layers]
        some = sorted({*(kinds.index(kind) for kind in kinds), len(kinds) - 1})
        logits = torch.zeros(1, spec.vocab_size, dtype=self._decoder.dtype, device=self._device)
        jobs: list[Callable[[], Any]] = [
            partial(self._sampler.warm_up, logits),
            *(self._dummy(query_len, some) for query_len in [largest_lens, *self._kinds(length, tokens)]),
            *(partial(self._decode, size, some) for size in FIRST if size <= most),
        ]
        for share in side_by_side(jobs):
            self._report("compiling kernels", share)
        self._report("measuring memory", 0.0)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # of jobs that were done at the same time
        hidden = self._dummy(largest_lens)()
        states = hidden.new_zeros(min(sizes.max_num_seqs, tokens), spec.hidden_size)
        logits = self._decoder.logits(states)
        part = logits[:LOGPROB_ROWS].float()
        token_logprobs(part, torch.zeros(len(part), dtype=torch.int64, device=self._device), 20, self._vocab_limit)
        torch.cuda.synchronize()
        del jobs, hidden, states, logits, part
        eager = before - torch.cuda.mem_get_info(self._device)[0]
        held = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._decode(most)
        torch.cuda.synchronize()
        decode = torch.cuda.max_memory_allocated(self._device) - held
        torch.cuda.reset_peak_memory_stats(self._device)
        for shape in self._mixes.waiting[:1]:
            self._clear_mixed_input(*shape)
            self._mix(*shape)
        torch.cuda.synchronize()
        mixed = torch.cuda.max_memory_allocated(self._device) - held
        graphs = len(self._decodes.waiting) + len(self._mixes.waiting)
        return eager + 2 * decode + mixed + graphs * GRAPH_BYTES + self._sampler.most_bytes(most)

    def _dummy(self, query_len: list[int], layers: list[int] | None = None) -> Callable[[], Tensor]:
        """A forward pass over fresh rows of these lengths, all in the sink, by these layers: its result is nonsense."""
        width = -(-max(query_len) // self.sizes.block_size)
        table = torch.zeros(len(query_len), width, dtype=torch.int32, device=self._device)
        batch = AttentionBatch.of(query_len, query_len, [table] * len(self.spec.kv_windows))
        ids = torch.zeros(sum(query_len), dtype=torch.int32, device=self._device)
        return partial(self._decoder.forward, ids, batch, self._cache, layers=layers)

    def _kinds(self, length: int, tokens: int) -> Iterator[list[int]]:
        """Lengths of rows that between them need every kernel of steps that are not captured."""
        for singles in SINGLE_ROWS:
            if singles + 2 <= min(tokens, self.sizes.max_num_seqs):
                yield [1] * singles + [2]
        longest = min(2048, length)
        while longest <= length:
            for rows in LONG_ROWS:
                if (rows - 1) * 2 + longest <= tokens and rows <= self.sizes.max_num_seqs:
                    yield [longest] + [2] * (rows - 1)
            longest *= 2

    def submit(self, step: Step) -> GPUStep:
        """Launches the step and returns at once."""
        with torch.inference_mode(), self._range("step"):
            return self._launch(step)

    def idle(self) -> bool:
        """Captures one more graph. Returns whether others wait."""
        with torch.inference_mode():
            if self._decodes.waiting:
                self._capture_decode()
            elif self._mixes.waiting:
                self._capture_mixed()
        return bool(self._decodes.waiting or self._mixes.waiting)

    def close(self) -> None:
        """Frees weights, cache and graphs."""
        torch.cuda.synchronize()
        self._decodes.clear()
        self._mixes.clear()
        self._device_rows.forget()
        del self._decoder, self._cache, self._tables, self._sampler
        torch.cuda.empty_cache()

    def _launch(self, step: Step) -> GPUStep:
        with self._range("prepare"):
            self._sampler.release(step.removed)
            if step.added:
                self._sampler.seat(step.added)
            self._device_rows.extend(step)
            chunks = self._rows.apply(step)
        if len(chunks.positions) == 0:
            return GPUStep(self._copies)
        rows = self._rows
        samples = np.nonzero(chunks.context_len == rows.length[chunks.rows])[0]
        shape = self._decodes.fit(len(chunks.rows)) if chunks.max_query_len == 1 else None
        with self._range("forward"):
            if shape is not None:
                hidden, logits, device_rows, positions = self._replay(chunks, samples, *shape)
            else:
                hidden, logits, device_rows, positions = self._forward(chunks, samples, self._mixed_shape(chunks))
        result = GPUStep(self._copies)
        with self._range("sample"):
            self._score_prompts(chunks, hidden, result)
            if len(samples):
                sampling = chunks.rows[samples]
                drawn = self._sampler.sample(logits, sampling, device_rows, positions)
                tops = [rows.starts[row].params.logprobs for row in sampling.tolist()] if drawn.logprobs else []
                result.take(sampling, drawn, tops)
                rows.append(sampling, np.full(len(sampling), ON_DEVICE))
        result.launched()
        return result

    def _replay(self, chunks: Chunks, samples: Ints, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One token a row by a graph of ``size`` rows: hidden states, and of the rows that sample the scores, their
        numbers and the positions that their tokens take."""
        n = len(chunks.rows)
        packed = np.zeros(3 * size, np.int32)
        packed[:n] = chunks.rows
        packed[n:size] = self._device_rows.sink_row
        packed[size : size + n] = chunks.context_len
        packed[size + n : 2 * size] = 1
        packed[2 * size : 2 * size + n] = self._rows.tokens[chunks.rows, chunks.positions]
        if not np.array_equal(packed, self._expected):
            self._input[: 3 * size].copy_(pinned(packed), non_blocking=True)
        hidden, logits = self._decodes.replay((size,))
        self._expected = packed
        packed[size : 2 * size] += packed[2 * size :] == ON_DEVICE
        hidden, device_rows, positions = hidden[:n], self._input[:n], self._lengths[:n]
        if len(samples) == n:
            return hidden, logits[:n], device_rows, positions
        at = upload(samples.astype(np.int32), self._device)
        return hidden, logits.index_select(0, at), device_rows.index_select(0, at), positions.index_select(0, at)

    def _decode(self, size: int, layers: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """What a graph of ``size`` rows does: from ``_input`` to hidden states and scores. It leaves the input of the
        next step in ``_input``, if the same rows go on. ``layers``: as `Decoder.forward` takes them."""
        rows, context_len, known = self._input[: 3 * size].view(3, size)
        tables = [table[:size] for table in self._tables]
        gather_rows(
            rows,
            context_len,
            known,
            self._sampler.last_token,
            self._device_rows.tables,
            block_size=self.sizes.block_size,
            tokens=self._tokens,
            positions=self._positions,
            lengths=self._lengths,
            out_tables=tables,
            pdl=overlaps(size),
        )
        batch = AttentionBatch(
            query_start=self._starts[: size + 1],
            context_len=self._lengths[:size],
            positions=self._positions[:size],
            token_rows=self._starts[:size],
            block_tables=tuple(tables),
            single_rows=size,
            max_query_len=1,
            max_context=self._max_context,
        )
        hidden = self._decoder.forward(self._tokens[:size], batch, self._cache, layers=layers)
        return hidden, self._decoder.logits(hidden)

    def _capture_decode(self) -> None:
        self._expected = np.zeros(0, np.int32)
        self._input.zero_()
        (size,) = self._decodes.waiting[0]
        self._input[:size] = self._device_rows.sink_row
        self._input[size : 2 * size] = 1
        self._decodes.capture()

    def _mixed_shape(self, chunks: Chunks) -> Shape | None:
        """Of the captured step that serves this one, if one does."""
        if len(chunks.rows) - chunks.single_rows > LONGER or chunks.max_context > MIXED_CONTEXT:
            return None
        return self._mixes.fit(len(chunks.positions), chunks.single_rows)

    def _mix(self, tokens: int, singles: int) -> tuple[Tensor]:
        """What a graph of a mixed step does: from ``_mixed_input`` to hidden states."""
        inputs = [self._mixed_input[place] for place in _mixed_places(tokens, singles)]
        return (self._compute(inputs, singles, tokens, min(MIXED_CONTEXT, self._max_context)),)

    def _capture_mixed(self) -> None:
        self._clear_mixed_input(*self._mixes.waiting[0])
        self._mixes.capture()

    def _clear_mixed_input(self, tokens: int, singles: int) -> None:
        """Leaves nothing but padding."""
        padding = self._padded(Chunks.none(), tokens, singles)
        packed, _ = concatenated(_step_input(padding, padding.positions[:0]))
        self._mixed_input[: len(packed)].copy_(pinned(packed))

    def _padded(self, chunks: Chunks, tokens: int, singles: int) -> Chunks:
        return chunks.padded(tokens, singles, LONGER, self._device_rows.sink_row)

    def _forward(self, chunks: Chunks, samples: Ints, shape: Shape | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Any step, by the graph of this shape if there is one; returns what `_replay` does."""
        sampling = chunks.rows[samples]
        step = chunks if shape is None else self._padded(chunks, *shape)
        packed, slices = concatenated(
            [
                *_step_input(step, self._rows.tokens[chunks.token_rows, chunks.positions]),
                chunks.query_start[samples + 1] - 1,
                sampling,
                self._rows.length[sampling],
            ]
        )
        if shape is None:
            ints = upload(packed, self._device)
        else:
            ints = self._mixed_input[: len(packed)].copy_(pinned(packed), non_blocking=True)
        *inputs, at, device_rows, positions = (ints[place] for place in slices)
        if shape is None:
            hidden = self._compute(inputs, chunks.single_rows, chunks.max_query_len, chunks.max_context)
        else:
            (hidden,) = self._mixes.replay(shape)
        logits = self._decoder.logits(hidden.index_select(0, at)) if len(samples) else hidden[:0]
        return hidden, logits, device_rows, positions

    def _compute(self, inputs: list[Tensor], single_rows: int, max_query_len: int, max_context: int) -> Tensor:
        """From `_step_input` on the device to hidden states."""
        rows, context_len, query_start, positions, token_rows, known = inputs
        last = self._sampler.last_token.index_select(0, rows.index_select(0, token_rows))
        width = -(-max_context // self.sizes.block_size)
        batch = AttentionBatch(
            query_start=query_start,
            context_len=context_len,
            positions=positions,
            token_rows=token_rows,
            block_tables=tuple(table[:, :width].index_select(0, rows) for table in self._device_rows.tables),
            single_rows=single_rows,
            max_query_len=max_query_len,
            max_context=max_context,
        )
        return self._decoder.forward(torch.where(known == ON_DEVICE, last, known), batch, self._cache)

    def _score_prompts(self, chunks: Chunks, hidden: Tensor, result: GPUStep) -> None:
        """Log-probabilities of prompt tokens: the state at a position predicts the token after it."""
        for found in self._rows.prompt_parts(chunks):
            states = hidden[found.start :][: len(found.ids)]
            ids = upload(found.ids, self._device)
            parts = [
                token_logprobs(self._decoder.logits(part).float(), targets, found.top, self._vocab_limit)
                for part, targets in zip(states.split(LOGPROB_ROWS), ids.split(LOGPROB_ROWS), strict=True)
            ]
            result.score(found, parts)

    @contextmanager
    def _range(self, name: str) -> Iterator[None]:
        """Shows up in NVIDIA's profilers, if asked for."""
        if not self._nvtx:
            yield
            return
        with torch.cuda.nvtx.range(name):
            yield


def _step_input(chunks: Chunks, known: Ints) -> list[Ints]:
    """What the device must be told of a step; ``known``: the ids of its first tokens, or `ON_DEVICE`."""
    ids = np.zeros(len(chunks.positions), np.int64)
    ids[: len(known)] = known
    return [chunks.rows, chunks.context_len, chunks.query_start, chunks.positions, chunks.token_index, ids]


def _mixed_places(tokens: int, singles: int) -> list[slice]:
    """Where `_step_input` of a captured step lies."""
    rows = singles + LONGER + 1
    return places([rows, rows, rows + 1, tokens, tokens, tokens])
