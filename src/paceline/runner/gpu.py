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
from paceline.kernels.triton.side_by_side import side_by_side
from paceline.kernels.upload import upload
from paceline.layers.attention import AttentionBatch
from paceline.models.decoder import Decoder
from paceline.models.loader import load_decoder
from paceline.models.registry import decoder_spec
from paceline.runner.decode_steps import DecodeSteps
from paceline.runner.device_model import DeviceModel
from paceline.runner.device_rows import ON_DEVICE, DeviceRows
from paceline.runner.device_sampler import DeviceSampler
from paceline.runner.gpu_step import GPUStep
from paceline.runner.graph_pool import GraphPool
from paceline.runner.graph_shapes import FIRST
from paceline.runner.kv_capacity import MIB, kv_capacity
from paceline.runner.memory import available_memory
from paceline.runner.mixed_steps import MixedSteps
from paceline.runner.rows import Chunks, Rows

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
        self._most = most = min(sizes.max_num_seqs, 1024)
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(device)[0]
        working = self._profile()
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
        first = sum(1 for (size,) in self._decodes.graphs.waiting if size in FIRST or size == most)
        for index in range(first):
            self._report("capturing graphs", index / first)
            self._decodes.capture()
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
        sizes = self.sizes
        self._cache = self._decoder.make_cache(self.kv_layout, num_blocks)
        self._rows = Rows(sizes.max_rows, max_model_len, sizes.block_size, len(num_blocks))
        self._device_rows = DeviceRows(self._rows, self._device)
        self._sampler = DeviceSampler(sizes.max_rows, self.spec.vocab_size, self._vocab_limit, self._device)
        rows, last_token = self._device_rows, self._sampler.last_token
        model = DeviceModel(self._decoder, self._cache, rows, last_token, sizes.block_size, max_model_len)
        self._decodes = DecodeSteps(model, self._pool, self._most)
        self._mixes = MixedSteps(model, self._pool, self._most, sizes.max_num_batched_tokens)

    @torch.inference_mode()
    def _profile(self) -> int:
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
            *(partial(self._decodes.compute, size, some) for size in FIRST if size <= self._most),
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
        self._decodes.compute(self._most)
        torch.cuda.synchronize()
        decode = torch.cuda.max_memory_allocated(self._device) - held
        torch.cuda.reset_peak_memory_stats(self._device)
        for shape in self._mixes.graphs.waiting[:1]:
            self._mixes.clear(*shape)
            self._mixes.compute(*shape)
        torch.cuda.synchronize()
        mixed = torch.cuda.max_memory_allocated(self._device) - held
        graphs = len(self._decodes.graphs.waiting) + len(self._mixes.graphs.waiting)
        return eager + 2 * decode + mixed + graphs * GRAPH_BYTES + self._sampler.most_bytes(self._most)

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
            for steps in (self._decodes, self._mixes):
                if steps.graphs.waiting:
                    steps.capture()
                    break
        return bool(self._decodes.graphs.waiting or self._mixes.graphs.waiting)

    def close(self) -> None:
        """Frees weights, cache and graphs."""
        torch.cuda.synchronize()
        self._decodes.graphs.clear()
        self._mixes.graphs.clear()
        self._device_rows.forget()
        del self._decoder, self._cache, self._decodes, self._mixes, self._sampler
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
        sampling = chunks.rows[samples]
        known = rows.tokens[chunks.token_rows, chunks.positions]
        size = self._decodes.fit(chunks)
        with self._range("forward"):
            if size is not None:
                computed = self._decodes.replay(size, chunks, known, samples)
            else:
                computed = self._mixes.run(self._mixes.fit(chunks), chunks, known, samples, rows.length[sampling])
        result = GPUStep(self._copies)
        with self._range("sample"):
            self._score_prompts(chunks, computed.hidden, result)
            if len(samples):
                drawn = self._sampler.sample(computed.logits, sampling, computed.rows, computed.positions)
                tops = [rows.starts[row].params.logprobs for row in sampling.tolist()] if drawn.logprobs else []
                result.take(sampling, drawn, tops)
                rows.append(sampling, np.full(len(sampling), ON_DEVICE))
        result.launched()
        return result

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
