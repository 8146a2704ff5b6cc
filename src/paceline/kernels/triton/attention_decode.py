"""Attention of one query token a row over the paged cache: reads keys and values once, at the speed of the memory.

The query heads that share a kv head are packed into one tile, so that a key is loaded once for all of them. Long rows
are split among programs (flash decoding); the last of a row's programs to finish adds the parts up, always in the same
order, so results do not depend on timing. The reference is `paceline.kernels.attention`.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from paceline.kernels.triton.decode_kernel import LOG2_E, decode_kernel
from paceline.kernels.triton.rotary_cache import check_cache

_MIN_TOKENS = 128
"""What shorter rows are split into at least."""


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """How the kernel is cut; results differ only by rounding.

    Attributes:
        tokens: a tile of keys, a power of 2 from 16.
        warps: of a program.
        stages: one more than the tiles that are loaded ahead.
        early: the fused kernel loads keys and values before it waits for ``qkv``. Takes more registers: for few rows.
        registers: of a thread at most, so that more programs run at a time; None: what the compiler takes.
    """

    tokens: int
    warps: int
    stages: int
    early: bool = False
    registers: int | None = None


ANY_TILES = DecodeTiles(32, 4, 3)
"""For every head size and dtype."""


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Where the splits of a row meet. Launches that follow one another may share it: it is left as it was found.

    Attributes:
        partial: float32, results of the splits.
        lse: float32, base-2 logarithms of the sums of their exponentials.
        counters: int32 zeros, one a row and kv head.
    """

    partial: Tensor
    lse: Tensor
    counters: Tensor

    @classmethod
    def of(
        cls, rows: int, num_heads: int, kv_heads: int, head_dim: int, num_splits: int, device: torch.device | str
    ) -> "DecodeWorkspace":
        """For at most ``rows`` rows, heads and splits."""
        parts = rows * num_heads * num_splits if num_splits > 1 else 0
        return cls(
            torch.empty(parts * head_dim, dtype=torch.float32, device=device),
            torch.empty(parts, dtype=torch.float32, device=device),
            torch.zeros(rows * kv_heads, dtype=torch.int32, device=device),
        )


def decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_len: Tensor,
    *,
    num_splits: int,
    window: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    softmax_scale: float | None = None,
    workspace: DecodeWorkspace | None = None,
    tiles: DecodeTiles | None = None,
    out: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """Attention of each row's last token, whose key and value are in the cache already.

    Args:
        query: ``[rows, q_heads, head_dim]``, rotated.
        key_cache, value_cache: ``[num_blocks, kv_heads, block_size, head_dim]``; float8_e4m3fn holds ``x / scale``.
        block_table: int32 ``[rows, max_blocks]``.
        context_len: int32 ``[rows]``, the query's token included. The result of a row of 0 is not written.
        num_splits: most programs that share a row. Shorter rows use fewer by themselves, so a captured graph can be
            made for the longest context.
        window: a token sees itself and the ``window - 1`` before it; None: all before it.
        softmax_scale: multiplies the scores; ``head_dim ** -0.5`` if None.
        workspace: for ``num_splits > 1``; made anew if None.
        pdl: start before the kernel in front of this one ends (programmatic dependent launch). ``block_table``,
            ``context_len`` and, with early `DecodeTiles`, keys and values of earlier tokens are then read at once:
            between what writes them and this there must be a launch without ``pdl``.

    Returns:
        ``[rows, q_heads, head_dim]`` in the dtype of ``query``.
    """
    if query.dim() != 3 or not query.is_contiguous():
        raise ValueError("query must be [rows, q_heads, head_dim] and contiguous")
    if out is None:
        out = torch.empty_like(query)
    _launch(
        query,
        1,
        (query.shape[0], query.shape[1] * query.shape[2], 0),
        key_cache,
        value_cache,
        block_table,
        context_len,
        (None, None, None, 0.0),
        num_splits,
        window,
        (k_scale, v_scale, softmax_scale),
        workspace,
        tiles,
        out,
        pdl,
    )
    return out


def rotary_decode_attention(
    qkv: Tensor,
    cos_sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_len: Tensor,
    *,
    num_splits: int,
    dtype: torch.dtype | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    window: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    softmax_scale: float | None = None,
    workspace: DecodeWorkspace | None = None,
    tiles: DecodeTiles | None = None,
    out: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """`rotary_cache` and `decode_attention` in one kernel, for steps in which every row has one token.

    Args:
        qkv: ``[rows, (q_heads + 2 * kv_heads) * head_dim]``, or partial sums ``[splits, rows, ...]``. Row ``r`` is at
            position ``context_len[r] - 1``; its key and value are written there.
        cos_sin: from `rotary_cos_sin`.
        dtype: of the result, when ``qkv`` is not in it already.
        context_len: as there, but padding has 1, with a finite block.

    Returns:
        ``[rows, q_heads, head_dim]``. Everything else as there.
    """
    check_cache(key_cache, value_cache)
    _, kv_heads, _, head_dim = key_cache.shape
    rows, width = qkv.shape[-2:]
    q_heads = width // head_dim - 2 * kv_heads
    if not qkv.is_contiguous() or q_heads < 1 or width % head_dim:
        raise ValueError(
            f"qkv {tuple(qkv.shape)} must be contiguous, heads of {head_dim}, 2 * {kv_heads} for the cache"
        )
    if (q_norm is None) != (k_norm is None):
        raise ValueError("give both q_norm and k_norm, or neither")
    if out is None:
        out = qkv.new_empty(rows, q_heads, head_dim, dtype=dtype or qkv.dtype)
    _launch(
        qkv,
        1 if qkv.dim() == 2 else qkv.shape[0],
        (rows, width, rows * width),
        key_cache,
        value_cache,
        block_table,
        context_len,
        (cos_sin, q_norm, k_norm, eps),
        num_splits,
        window,
        (k_scale, v_scale, softmax_scale),
        workspace,
        tiles,
        out,
        pdl,
    )
    return out


def _launch(
    query: Tensor,
    qkv_splits: int,
    shape: tuple[int, int, int],
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_len: Tensor,
    rotary: tuple[Tensor | None, Tensor | None, Tensor | None, float],
    num_splits: int,
    window: int | None,
    scales: tuple[float, float, float | None],
    workspace: DecodeWorkspace | None,
    tiles: DecodeTiles | None,
    out: Tensor,
    pdl: bool,
) -> None:
    check_cache(key_cache, value_cache)
    _, kv_heads, block_size, head_dim = key_cache.shape
    rows, query_stride, split_stride = shape
    q_heads = out.shape[1]
    if q_heads % kv_heads:
        raise ValueError(f"{q_heads} query heads cannot share {kv_heads} kv heads evenly")
    if num_splits < 1:
        raise ValueError(f"num_splits must be at least 1, not {num_splits}")
    if rows == 0:
        return
    if num_splits > 1 and workspace is None:
        workspace = DecodeWorkspace.of(rows, q_heads, kv_heads, head_dim, num_splits, out.device)
    if num_splits > 1 and workspace is not None and workspace.lse.numel() < rows * q_heads * num_splits:
        raise ValueError(f"the workspace is too small for {rows} rows and {num_splits} splits")
    cos_sin, q_norm, k_norm, eps = rotary
    k_scale, v_scale, softmax_scale = scales
    tiles = tiles or ANY_TILES
    options: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    decode_kernel[(kv_heads * num_splits, rows)](
        query,
        key_cache,
        value_cache,
        block_table,
        context_len,
        cos_sin,
        q_norm,
        k_norm,
        out,
        workspace.partial if workspace else None,
        workspace.lse if workspace else None,
        workspace.counters if workspace else None,
        num_splits,
        window or 0,
        query_stride,
        split_stride,
        block_table.stride(0),
        key_cache.stride(0),
        value_cache.stride(0),
        (head_dim**-0.5 if softmax_scale is None else softmax_scale) * LOG2_E,
        eps,
        k_scale,
        v_scale,
        KV_HEADS=kv_heads,
        GROUP=q_heads // kv_heads,
        D=head_dim,
        D_PAD=triton.next_power_of_2(head_dim),
        ROWS=max(16, triton.next_power_of_2(q_heads // kv_heads)),
        BLOCK_SIZE=block_size,
        TILE=tiles.tokens,
        STAGES=tiles.stages,
        MIN_TILES=max(1, _MIN_TOKENS // tiles.tokens),
        SPLIT=num_splits > 1,
        WINDOW=window is not None,
        FUSED=cos_sin is not None,
        QKV_SPLITS=qkv_splits,
        NORM=q_norm is not None,
        PAIRS=key_cache.element_size() == 1,
        NATIVE=key_cache.is_cuda,
        EARLY=tiles.early and cos_sin is not None,
        # Warps that share the tokens of a tile would have to meet for a sum: one a column, until the end, spares that.
        SUMS=tiles.tokens if tiles.warps > 1 else 1,
        PDL=pdl,
        num_warps=tiles.warps,
        maxnreg=tiles.registers,
        **options,
    )
