"""Paged attention on a GPU, by the Triton kernels."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.cudnn_attention import CudnnPrefill
from paceline.kernels.triton.attention_decode import (
    ANY_TILES,
    DecodeTiles,
    DecodeWorkspace,
    decode_attention,
    rotary_decode_attention,
)
from paceline.kernels.triton.attention_prefill import prefill_attention
from paceline.kernels.triton.prefill_rows import PrefillRows
from paceline.kernels.triton.rotary_cache import rotary_cache, rotary_cos_sin
from paceline.layers.attention import AttentionBatch, AttentionSpec, HeadNorms
from paceline.layers.gpu_linear import overlaps
from paceline.layers.kv_cache import KVLayout
from paceline.layers.paged_cache import PagedKVCache

MIN_SPLIT = 128
"""Tokens below which a split of a row costs more than it saves."""


@dataclass(frozen=True, slots=True)
class DecodeCut:
    """How decode attention is cut for steps of some size; measured with `benchmarks/decode_step.py` on an H200."""

    heads: int
    """For at most so many heads of keys, those of all rows together."""
    tiles: DecodeTiles
    programs: int
    """For each multiprocessor, about; they share the keys of long rows."""


ANY = 1 << 31
WIDE = (
    DecodeCut(8, DecodeTiles(64, 2, 3, early=True), 4),
    DecodeCut(32, DecodeTiles(32, 2, 4, early=True), 4),
    DecodeCut(64, DecodeTiles(64, 2, 3), 2),
    DecodeCut(128, DecodeTiles(32, 2, 4, early=True), 4),
    DecodeCut(4096, DecodeTiles(64, 2, 2), 4),
    DecodeCut(ANY, DecodeTiles(32, 1, 3), 4),
)
"""For caches with 2 bytes an element and heads of at most 128."""
NARROW = (
    DecodeCut(8, DecodeTiles(64, 2, 3, early=True), 4),
    DecodeCut(32, DecodeTiles(32, 2, 4, early=True), 4),
    DecodeCut(64, DecodeTiles(64, 2, 3), 2),
    DecodeCut(128, DecodeTiles(32, 2, 4, early=True), 4),
    DecodeCut(4096, DecodeTiles(64, 2, 3), 4),
    DecodeCut(ANY, DecodeTiles(32, 1, 4), 4),
)
"""With 1 byte an element."""


def decode_cut(
    heads: int, reach: int, head_dim: int, itemsize: int, multiprocessors: int, *, mixed: bool = False
) -> tuple[DecodeTiles, int]:
    """Tiles, and programs that share a row of at most ``reach`` tokens. Shorter rows use fewer by themselves.

    Args:
        heads: those of keys of all rows together.
        itemsize: bytes of an element of the cache.
        mixed: longer rows take most of the step's time, so that one cut will do for all numbers of single ones.
    """
    cuts = NARROW if itemsize == 1 else WIDE
    cut = cuts[-1] if mixed else next(cut for cut in cuts if heads <= cut.heads)
    splits = max(1, min(cut.programs * multiprocessors // heads, reach // MIN_SPLIT))
    return ANY_TILES if itemsize > 2 or head_dim > 128 else cut.tiles, splits


CUDNN_TOKENS = 512
"""Where no row has so many, cuDNN gains nothing."""
CUDNN_ROWS = 16
COPIED_TOKENS = 1 << 18
"""At most so many tokens of an FP8 cache are widened for cuDNN."""


@dataclass(frozen=True, slots=True)
class _Plan:
    batch: AttentionBatch
    block_table: Tensor
    window: int | None
    tiles: DecodeTiles
    num_splits: int
    """Of rows with one token."""
    longer: PrefillRows | None
    """The other rows, if cuDNN computes them."""
    pdl: bool


class PagedAttention:
    """Serves GPUs. Rows of one token are read at the speed of the memory, longer ones on the tensor cores: by cuDNN
    where there are many tokens and the extra ``cudnn`` is installed, else by a Triton kernel."""

    name = "paged"

    def __init__(self, spec: AttentionSpec, dtype: torch.dtype) -> None:
        self._spec, self._dtype = spec, dtype
        device = spec.inverse_frequencies.device
        self._cos_sin = rotary_cos_sin(spec.inverse_frequencies, spec.max_position, spec.rope_scale)
        self._multiprocessors = 132
        if device.type == "cuda":
            self._multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        # For single rows beside longer ones: those wait for the memory, these for the tensor cores.
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._cudnn = CudnnPrefill(device) if CudnnPrefill.available(device) else None
        # Few rows have many splits and many rows have few: rows, heads and splits together are never more programs.
        programs = max(cut.programs for cut in (*WIDE, *NARROW)) * self._multiprocessors
        rows = -(-programs // (2 * spec.num_kv_heads))
        self._workspace = DecodeWorkspace.of(rows, spec.num_heads, spec.num_kv_heads, spec.head_dim, 2, device)

    @staticmethod
    def serves(device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int) -> bool:
        if device.type != "cuda" or head_dim % 2:
            return False
        if kv_dtype == torch.float8_e4m3fn and head_dim < 32:
            return False  # half a head is less than the matrix unit takes at once
        return kv_dtype == dtype or (kv_dtype == torch.float8_e4m3fn and dtype in (torch.bfloat16, torch.float16))

    def make_cache(self, layout: KVLayout, num_blocks: Sequence[int], device: torch.device) -> PagedKVCache:
        return PagedKVCache(layout, num_blocks, device)

    def plan(self, batch: AttentionBatch, group: int, window: int | None, cache: PagedKVCache) -> _Plan:
        reach = batch.max_context if window is None else min(window, batch.max_context)
        mixed = batch.single_rows < len(batch.context_len)
        heads = max(1, batch.single_rows * self._spec.num_kv_heads)
        itemsize = cache.layout.dtype.itemsize
        tiles, splits = decode_cut(heads, reach, self._spec.head_dim, itemsize, self._multiprocessors, mixed=mixed)
        pdl = batch.positions.is_cuda and overlaps(len(batch.positions))
        longer = self._longer_rows(batch, group, cache) if window is None else None
        return _Plan(batch, batch.block_tables[group], window, tiles, splits, longer, pdl)

    def _longer_rows(self, batch: AttentionBatch, group: int, cache: PagedKVCache) -> PrefillRows | None:
        """Rows of several tokens, if cuDNN serves them best."""
        singles, layout = batch.single_rows, cache.layout
        rows = len(batch.context_len) - singles
        if self._cudnn is None or batch.max_query_len < CUDNN_TOKENS or rows > CUDNN_ROWS:
            return None
        copy = layout.dtype == torch.float8_e4m3fn
        if self._dtype == torch.float32 or (copy and rows * batch.max_context > COPIED_TOKENS):
            return None
        return PrefillRows.of(
            batch.block_tables[group][singles:],
            batch.query_start[singles:],
            batch.context_len[singles:],
            batch.max_query_len,
            batch.max_context,
            limit=self._spec.max_position,
            block_size=layout.block_size,
            token_elements=self._spec.num_heads * self._spec.head_dim,
            copy=copy,
        )

    def attend(self, plan: _Plan, qkv: Tensor, norms: HeadNorms | None, cache: PagedKVCache, layer: int) -> Tensor:
        batch, spec = plan.batch, self._spec
        keys, values = cache.keys[layer], cache.values[layer]
        q_norm, k_norm = (norms.query, norms.key) if norms is not None else (None, None)
        singles, rows, tokens = batch.single_rows, len(batch.context_len), len(batch.positions)
        if singles == rows:
            return rotary_decode_attention(
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
                tiles=plan.tiles,
                pdl=plan.pdl,
            ).view(tokens, -1)
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
        if singles and self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream())
        if plan.longer is not None and self._cudnn is not None:
            self._cudnn.attend(query, keys, values, plan.longer, out=out)
        else:
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
        if not singles:
            return out.view(tokens, -1)
        with torch.cuda.stream(self._side):
            decode_attention(
                query[:singles],
                keys,
                values,
                plan.block_table[:singles],
                batch.context_len[:singles],
                num_splits=plan.num_splits,
                window=plan.window,
                workspace=self._workspace,
                tiles=plan.tiles,
                out=out[:singles],
            )
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)
        return out.view(tokens, -1)
