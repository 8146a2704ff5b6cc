"""Paged attention on a GPU, by the Triton kernels."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.triton.attention_decode import (
    DecodeWorkspace,
    decode_attention,
    num_decode_splits,
    rotary_decode_attention,
)
from paceline.kernels.triton.attention_prefill import prefill_attention
from paceline.kernels.triton.rotary_cache import rotary_cache, rotary_cos_sin
from paceline.layers.attention import AttentionBatch, AttentionSpec, HeadNorms
from paceline.layers.gpu_linear import overlaps
from paceline.layers.kv_cache import KVLayout
from paceline.layers.paged_cache import PagedKVCache


@dataclass(frozen=True, slots=True)
class _Plan:
    batch: AttentionBatch
    block_table: Tensor
    window: int | None
    num_splits: int
    """Of rows with one token."""
    pdl: bool


class PagedAttention:
    """Serves GPUs. Rows of one token are read at the speed of the memory, longer ones on the tensor cores."""

    name = "paged"

    def __init__(self, spec: AttentionSpec, dtype: torch.dtype) -> None:
        self._spec, self._dtype = spec, dtype
        device = spec.inverse_frequencies.device
        self._cos_sin = rotary_cos_sin(spec.inverse_frequencies, spec.max_position, spec.rope_scale)
        self._multiprocessors = 132
        if device.type == "cuda":
            self._multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        # Few rows have many splits, and many rows have one: the most of both is needed nowhere.
        split = [(rows, self._num_splits(rows, spec.max_position)) for rows in range(1, 8 * self._multiprocessors)]
        rows, most = max(split, key=lambda pair: pair[0] * pair[1] if pair[1] > 1 else 0)
        self._workspace = DecodeWorkspace.of(
            max(rows for rows, splits in split if splits > 1 or rows == 1),
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            most,
            device,
        )

    @staticmethod
    def serves(device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int) -> bool:
        if device.type != "cuda" or head_dim % 2:
            return False
        return kv_dtype == dtype or (kv_dtype == torch.float8_e4m3fn and dtype in (torch.bfloat16, torch.float16))

    def make_cache(self, layout: KVLayout, num_blocks: Sequence[int], device: torch.device) -> PagedKVCache:
        return PagedKVCache(layout, num_blocks, device)

    def plan(self, batch: AttentionBatch, group: int, window: int | None, cache: PagedKVCache) -> _Plan:
        reach = batch.max_context if window is None else min(window, batch.max_context)
        splits = self._num_splits(batch.single_rows, reach) if batch.single_rows else 1
        return _Plan(
            batch, batch.block_tables[group], window, splits, batch.positions.is_cuda and overlaps(len(batch.positions))
        )

    def _num_splits(self, rows: int, reach: int) -> int:
        return num_decode_splits(rows, self._spec.num_kv_heads, reach, self._multiprocessors)

    def attend(self, plan: _Plan, qkv: Tensor, norms: HeadNorms | None, cache: PagedKVCache, layer: int) -> Tensor:
        batch, spec = plan.batch, self._spec
        keys, values = cache.keys[layer], cache.values[layer]
        q_norm, k_norm = (norms.query, norms.key) if norms is not None else (None, None)
        singles, rows, tokens = batch.single_rows, len(batch.context_len), len(batch.positions)
        if singles == rows:
            attended = rotary_decode_attention(
                qkv,
                self._cos_sin,
                keys,
                values,
                plan.block_table,
                batch.context_len,
                num_splits=plan.num_splits,
                dtype=self._dtype,
                q_norm=q_norm,
                k_norm=k_norm,
                eps=spec.norm_eps,
                window=plan.window,
                workspace=self._workspace,
                pdl=plan.pdl,
            )
            return attended.view(tokens, -1)
        query = rotary_cache(
            qkv,
            batch.positions,
            self._cos_sin,
            keys,
            values,
            rows=batch.token_rows,
            block_table=plan.block_table,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=spec.norm_eps,
            dtype=self._dtype,
            pdl=plan.pdl,
        )
        out = torch.empty_like(query)
        if singles:
            decode_attention(
                query[:singles],
                keys,
                values,
                plan.block_table[:singles],
                batch.context_len[:singles],
                num_splits=plan.num_splits,
                window=plan.window,
                workspace=self._workspace,
                out=out[:singles],
            )
        prefill_attention(
            query,
            keys,
            values,
            plan.block_table[singles:],
            batch.query_start[singles:],
            batch.context_len[singles:],
            batch.max_query_len,
            window=plan.window,
            out=out,
        )
        return out.view(tokens, -1)
