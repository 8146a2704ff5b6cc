"""Causal attention of many query tokens over the paged cache, by cuDNN's fused kernel.

cuDNN's SDPA graph reads keys and values through block tables, queries row after row through offsets, and the lengths
of the rows from the device, so one execution plan serves all lengths up to the maxima it was built for. Maxima are
rounded up to powers of 2, and plans that differ in shape only share one compiled kernel. The package
`nvidia-cudnn-frontend` (the extra ``cudnn``) is imported when it is first used. The reference is
`paceline.kernels.attention`.
"""

import importlib
import importlib.util
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from paceline.kernels.triton.rotary_cache import check_cache

Path = Literal["paged", "padded", "gathered"]

MIN_VERSION = 91000
"""cuDNN 9.10: block tables together with offsets, and heads of up to 256."""
MIN_TOKENS = 128
"""Smallest maximum of the queries or of the context of a row that a plan is built for."""

(QUERY, KEYS, VALUES, OUT, QUERY_LENS, CONTEXT_LENS, OFFSETS, KEY_TABLE, VALUE_TABLE) = range(1, 10)
"""Names of the tensors of a graph."""


def power_of_2(n: int, at_least: int = 1) -> int:
    """The smallest power of 2 that is not less than either."""
    return 1 << (max(n, at_least) - 1).bit_length()


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """The rows of one step as cuDNN reads them; made once a step, used by every layer.

    Attributes:
        max_query, max_context: tokens of a row, rounded up.
        query_lens, context_lens: int32 ``[rows]``, rows rounded up; 0 for the rows that were added.
        offsets: int32 ``[rows + 1]``, the elements of the queries before each row.
        block_table: int32 ``[rows, max_context / block_size]``; past its context a row repeats its first block.
        tail_block, tail_slot: int64 ``[rows * block_size]``, the unwritten slots of the last blocks; the sink's first
            slot takes the remaining entries.
    """

    max_query: int
    max_context: int
    query_lens: Tensor
    context_lens: Tensor
    offsets: Tensor
    block_table: Tensor
    tail_block: Tensor
    tail_slot: Tensor

    @classmethod
    def of(
        cls,
        block_table: Tensor,
        query_start: Tensor,
        context_len: Tensor,
        max_query_len: int,
        max_context: int,
        block_size: int,
        token_elements: int,
    ) -> "PrefillRows":
        """Rounds up what a plan depends on; nothing waits for the device.

        Args:
            block_table: int32 ``[rows, max_blocks]``, of any width that holds the contexts.
            query_start: int32 ``[rows + 1]``.
            context_len: int32 ``[rows]``, the row's query tokens included.
            max_query_len, max_context: at least the most of a row.
            block_size: a power of 2.
            token_elements: ``q_heads * head_dim``.
        """
        rows = len(context_len)
        padded = power_of_2(rows)
        longest = power_of_2(max_context, max(MIN_TOKENS, block_size))
        width = longest // block_size
        int32: dict[str, Any] = {"dtype": torch.int32, "device": block_table.device}
        query_lens, context_lens = (torch.zeros(padded, **int32) for _ in range(2))
        torch.sub(query_start[1 : rows + 1], query_start[:rows], out=query_lens[:rows])
        context_lens[:rows] = context_len
        offsets = torch.empty(padded + 1, **int32)
        torch.mul(query_start[: rows + 1], token_elements, out=offsets[: rows + 1])
        offsets[rows + 1 :] = offsets[rows]
        table = torch.zeros(padded, width, **int32)
        used = min(width, block_table.shape[1])
        table[:rows, :used] = block_table[:rows, :used]
        # A tile of keys may reach past a context. What lies there is masked, but it is read, so it must be the row's.
        column = torch.arange(width, **int32)
        table = torch.where(column * block_size < context_lens[:, None], table, table[:, :1])
        slot = torch.arange(block_size, device=table.device)
        last = (context_lens - 1).clamp_(min=0).long()[:, None]
        unwritten = (slot > last % block_size) & (query_lens > 0)[:, None]
        tail_block = table.gather(1, last // block_size).long() * unwritten
        return cls(
            power_of_2(max_query_len, MIN_TOKENS),
            longest,
            query_lens,
            context_lens,
            offsets,
            table,
            tail_block.flatten(),
            (slot * unwritten).flatten(),
        )


class CudnnPrefill:
    """Prefill attention by cuDNN, for bfloat16 and float16 caches, without a window.

    Plans and their workspaces are this object's: use it from one thread, on one stream at a time. A shape's first call
    makes its plan, and the first of all compiles the kernel, so neither may lie in a CUDA graph.

    Args:
        device: a GPU.
        path: "paged" reads the cache through block tables and the queries through offsets. "padded" copies the
            queries to rows of equal length and the results back. "gathered" copies keys and values out of their
            blocks first.
        clear_tails: cuDNN may multiply the values of masked slots by 0, which a NaN survives. So the unwritten
            slots of the rows' last blocks, where another sequence's may be, are set to 0 first.
        dynamic_shapes: plans of different shapes share one kernel, which is compiled once; otherwise each compiles
            its own.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        path: Path = "paged",
        clear_tails: bool = True,
        dynamic_shapes: bool = True,
    ) -> None:
        self.path = path
        self.clear_tails = clear_tails
        self.dynamic_shapes = dynamic_shapes
        self._device = device
        self._cudnn: Any = _frontend()
        with torch.cuda.device(device):
            self._handle = self._cudnn.create_handle()
        self._stream: int | None = None
        self._plans: dict[tuple[Any, ...], tuple[Any, Tensor]] = {}
        self._kernels: dict[tuple[Any, ...], Any] = {}

    @staticmethod
    def available(device: torch.device) -> bool:
        """Whether the extra ``cudnn`` is installed, and the GPU and its cuDNN library can run these graphs."""
        if device.type != "cuda" or not torch.cuda.is_available() or importlib.util.find_spec("cudnn") is None:
            return False
        return torch.cuda.get_device_capability(device) >= (9, 0) and _frontend().backend_version() >= MIN_VERSION

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        block_table: Tensor,
        query_start: Tensor,
        context_len: Tensor,
        max_query_len: int,
        max_context: int,
        out: Tensor | None = None,
        *,
        softmax_scale: float | None = None,
    ) -> Tensor:
        """Causal attention of the last tokens of each row, whose keys and values are in the cache already.

        Args:
            query: ``[T, q_heads, head_dim]``, rotated, row after row; bfloat16 or float16.
            keys, values: ``[num_blocks, kv_heads, block_size, head_dim]`` in the dtype of ``query``.
            block_table: int32 ``[rows, max_blocks]``.
            query_start: int32 ``[rows + 1]``: row ``r`` has tokens ``query_start[r]`` to ``query_start[r + 1]``.
            context_len: int32 ``[rows]``, the row's query tokens included.
            max_query_len, max_context: at least the most query tokens and the longest context of a row.
            softmax_scale: multiplies the scores; ``head_dim ** -0.5`` if None.

        Returns:
            ``[T, q_heads, head_dim]`` in the dtype of ``query``.

        Raises:
            ValueError: for other dtypes or layouts.
            cudnn.cudnnGraphNotSupportedError: cuDNN has no kernel for the shape.
        """
        if len(context_len) == 0 or max_query_len == 0:
            return torch.empty_like(query) if out is None else out
        rows = PrefillRows.of(
            block_table, query_start, context_len, max_query_len, max_context, keys.shape[2], query[0].numel()
        )
        return self.attend_rows(query, keys, values, rows, out, softmax_scale=softmax_scale)

    def attend_rows(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        rows: PrefillRows,
        out: Tensor | None = None,
        *,
        softmax_scale: float | None = None,
    ) -> Tensor:
        """`attend` with rows that were made before, for another layer."""
        check_cache(keys, values)
        if query.dtype not in (torch.bfloat16, torch.float16) or not query.dtype == keys.dtype == values.dtype:
            raise ValueError(f"queries are {query.dtype}, the cache {keys.dtype}; cuDNN needs one 16-bit dtype")
        if query.dim() != 3 or not query.is_contiguous():
            raise ValueError("query must be [T, q_heads, head_dim] and contiguous")
        if query.numel() >= 1 << 31:
            raise ValueError(f"{len(query)} query tokens are more than 32-bit offsets reach")
        if out is None:
            out = torch.empty_like(query)
        scale = query.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
        if self.clear_tails:
            values[rows.tail_block, :, rows.tail_slot] = 0
        asked, result = query, out
        if self.path == "padded":
            start = rows.offsets // query[0].numel()
            token = torch.arange(rows.max_query, device=query.device) + start[:-1, None]
            asked = query[token.clamp_(max=len(query) - 1)]
            result = torch.empty_like(asked)
        elif self.path == "gathered":
            keys, values = (_gather(cache, rows.block_table) for cache in (keys, values))
        self._execute(asked, keys, values, rows, result, scale)
        if self.path == "padded":
            token = torch.arange(len(query), device=query.device, dtype=torch.int32)
            row = torch.searchsorted(start[1:], token, right=True).clamp_(max=len(start) - 2)
            place = (token - start[row]).clamp_(0, rows.max_query - 1)
            owned = (token >= start[0]) & (token < start[-1])
            out.copy_(torch.where(owned[:, None, None], result[row, place], out))
        return out

    def _execute(
        self, query: Tensor, keys: Tensor, values: Tensor, rows: PrefillRows, out: Tensor, scale: float
    ) -> None:
        count, heads = len(rows.query_lens), query.shape[-2]
        shapes = (count, rows.max_query, rows.max_context, keys.shape, keys.stride(), values.stride())
        key = (*shapes, query.dtype, heads, scale)
        if key not in self._plans:
            graph = self._build(heads, query.dtype, keys, values, rows, scale)
            size = graph.get_workspace_size()
            self._plans[key] = graph, torch.empty(size, dtype=torch.uint8, device=self._device)
        graph, workspace = self._plans[key]
        stream = torch.cuda.current_stream(self._device).cuda_stream
        if stream != self._stream:
            self._cudnn.set_stream(handle=self._handle, stream=stream)
            self._stream = stream
        pointers = {
            QUERY: query.data_ptr(),
            KEYS: keys.data_ptr(),
            VALUES: values.data_ptr(),
            OUT: out.data_ptr(),
            QUERY_LENS: rows.query_lens.data_ptr(),
            CONTEXT_LENS: rows.context_lens.data_ptr(),
        }
        if self.path != "padded":
            pointers[OFFSETS] = rows.offsets.data_ptr()
        if self.path != "gathered":
            pointers[KEY_TABLE] = pointers[VALUE_TABLE] = rows.block_table.data_ptr()
        graph.execute(pointers, workspace.data_ptr(), handle=self._handle)

    def _build(
        self, heads: int, dtype: torch.dtype, keys: Tensor, values: Tensor, rows: PrefillRows, scale: float
    ) -> Any:
        cudnn, head_dim, count = self._cudnn, keys.shape[-1], len(rows.query_lens)
        data_type = cudnn.data_type.BFLOAT16 if dtype == torch.bfloat16 else cudnn.data_type.HALF
        options: dict[str, Any] = {}
        if self.dynamic_shapes:
            kind = (dtype, heads, keys.shape[1], head_dim)
            if kind not in self._kernels:
                self._kernels[kind] = cudnn.create_kernel_cache()
            options = {"kernel_cache": self._kernels[kind], "is_dynamic_shape_enabled": True}
        graph = cudnn.pygraph(
            io_data_type=data_type,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=self._handle,
            **options,
        )

        def tensor(uid: int, dim: tuple[int, ...], stride: tuple[int, ...], kind: Any = data_type) -> Any:
            return graph.tensor(name=f"t{uid}", dim=dim, stride=stride, data_type=kind).set_uid(uid)

        int32, ones = cudnn.data_type.INT32, (1, 1, 1)
        shape = (count, heads, rows.max_query, head_dim)
        stride = (rows.max_query * heads * head_dim, head_dim, heads * head_dim, 1)
        query = tensor(QUERY, shape, stride)
        offsets = None
        if self.path != "padded":
            offsets = tensor(OFFSETS, (count + 1, *ones), (1, *ones), int32)
            query.set_ragged_offset(offsets)
        paged: dict[str, Any] = {}
        if self.path != "gathered":
            width = rows.block_table.shape[1]
            table = ((count, 1, width, 1), (width, width, 1, 1), int32)
            paged = {
                "paged_attention_k_table": tensor(KEY_TABLE, *table),
                "paged_attention_v_table": tensor(VALUE_TABLE, *table),
                "paged_attention_max_seq_len_kv": rows.max_context,
            }
        result, _ = graph.sdpa(
            q=query,
            k=tensor(KEYS, tuple(keys.shape), keys.stride()),
            v=tensor(VALUES, tuple(values.shape), values.stride()),
            generate_stats=False,
            attn_scale=scale,
            use_padding_mask=True,
            seq_len_q=tensor(QUERY_LENS, (count, *ones), (1, *ones), int32),
            seq_len_kv=tensor(CONTEXT_LENS, (count, *ones), (1, *ones), int32),
            diagonal_alignment=cudnn.diagonal_alignment.BOTTOM_RIGHT,
            diagonal_band_right_bound=0,
            name="prefill",
            **paged,
        )
        result.set_uid(OUT).set_output(True).set_dim(shape).set_stride(stride).set_data_type(data_type)
        if offsets is not None:
            result.set_ragged_offset(offsets)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A])
        graph.check_support()
        graph.build_plans()
        return graph


def _frontend() -> ModuleType:
    # Its library is the one that torch has loaded, so torch comes first.
    return importlib.import_module("cudnn")


def _gather(cache: Tensor, block_table: Tensor) -> Tensor:
    """``[rows, kv_heads, tokens, head_dim]`` out of the blocks ``[num_blocks, kv_heads, block_size, head_dim]``."""
    blocks, kv_heads, block_size, head_dim = cache.shape
    elements = block_size * head_dim
    pieces = cache.stride(0) // elements
    flat = cache.as_strided(((blocks - 1) * pieces + kv_heads, elements), (elements, 1))
    head = torch.arange(kv_heads, dtype=torch.int32, device=cache.device)
    piece = block_table[:, None, :] * pieces + head[:, None]
    return flat.index_select(0, piece.flatten()).view(len(block_table), kv_heads, -1, head_dim)
