"""Causal attention of many query tokens over the paged cache, by cuDNN's fused kernel.

cuDNN's SDPA graph reads keys and values through block tables, queries row after row through offsets, and the lengths
of the rows from the device, so one execution plan serves all lengths up to the maxima it was built for. Maxima are
rounded up to powers of 2, so that plans are few. The package `nvidia-cudnn-frontend` (the extra ``cudnn``) is imported
when it is first used. The reference is `paceline.kernels.attention`.
"""

import importlib
import importlib.util
from threading import Lock
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from paceline.kernels.triton.prefill_rows import PrefillRows, clear_tails, widened
from paceline.kernels.triton.rotary_cache import check_cache

MIN_VERSION = 91000
"""cuDNN 9.10: block tables together with offsets, and heads of up to 256."""
ANY_BLOCKS = 1 << 20
"""More than a cache has: a plan need not know how many there are."""

(QUERY, KEYS, VALUES, OUT, QUERY_LENS, CONTEXT_LENS, OFFSETS, TABLE, TABLE_AGAIN) = range(1, 10)
"""Names of the tensors of a graph."""


class CudnnPrefill:
    """Prefill attention by cuDNN for bfloat16 and float16, without a window.

    A shape's first call makes its plan, which takes a tenth of a second and must not lie in a CUDA graph.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cudnn: Any = _frontend()
        with torch.cuda.device(device):
            self._handle = self._cudnn.create_handle()
        self._lock = Lock()
        self._stream: int | None = None
        self._plans: dict[tuple[Any, ...], tuple[Any, Tensor]] = {}

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
        rows: PrefillRows,
        *,
        out: Tensor | None = None,
        softmax_scale: float | None = None,
    ) -> Tensor:
        """Causal attention of the last tokens of each row, whose keys and values are in the cache already.

        The unwritten slots of a row's last block become 0 on the way: cuDNN multiplies the values of masked slots by 0,
        which a NaN that another sequence left there would survive.

        Args:
            query: ``[T, q_heads, head_dim]``, rotated, row after row; bfloat16 or float16.
            keys, values: ``[num_blocks, kv_heads, block_size, head_dim]`` in the dtype of ``query``, or float8_e4m3fn
                without a scale if the rows were made with ``copy``.
            softmax_scale: multiplies the scores; ``head_dim ** -0.5`` if None.

        Returns:
            ``[T, q_heads, head_dim]`` in the dtype of ``query``. Tokens that no row has are not written.

        Raises:
            ValueError: for other dtypes or layouts.
            cudnn.cudnnGraphNotSupportedError: cuDNN has no kernel for the shape.
        """
        check_cache(keys, values)
        stored = torch.float8_e4m3fn if rows.copied else query.dtype
        if query.dtype not in (torch.bfloat16, torch.float16) or keys.dtype != stored:
            raise ValueError(f"queries are {query.dtype}, the cache {keys.dtype}; the cache should be {stored}")
        if query.dim() != 3 or not query.is_contiguous():
            raise ValueError("query must be [T, q_heads, head_dim] and contiguous")
        if query.numel() >= 1 << 31:
            raise ValueError(f"{len(query)} query tokens are more than 32-bit offsets reach")
        if out is None:
            out = torch.empty_like(query)
        scale = query.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
        if rows.copied:
            keys, values = widened(keys, values, rows, query.dtype)
        else:
            clear_tails(values, rows)
        with self._lock:  # plans and their workspaces are this object's
            self._execute(query, keys, values, rows, out, scale)
        return out

    def _execute(
        self, query: Tensor, keys: Tensor, values: Tensor, rows: PrefillRows, out: Tensor, scale: float
    ) -> None:
        shape = (len(rows.query_lens), rows.max_query, rows.max_context, keys.shape[1:])
        key = (*shape, keys.stride(), values.stride(), query.dtype, query.shape[1], scale)
        if key not in self._plans:
            graph = self._build(query.shape[1], query.dtype, keys, values, rows, scale)
            size = graph.get_workspace_size()
            self._plans[key] = graph, torch.empty(size, dtype=torch.uint8, device=self._device)
        graph, workspace = self._plans[key]
        stream = torch.cuda.current_stream(self._device).cuda_stream
        if stream != self._stream:
            self._cudnn.set_stream(handle=self._handle, stream=stream)
            self._stream = stream
        table = rows.table.data_ptr()
        pointers = {
            QUERY: query.data_ptr(),
            KEYS: keys.data_ptr(),
            VALUES: values.data_ptr(),
            OUT: out.data_ptr(),
            QUERY_LENS: rows.query_lens.data_ptr(),
            CONTEXT_LENS: rows.context_lens.data_ptr(),
            OFFSETS: rows.offsets.data_ptr(),
            TABLE: table,
            TABLE_AGAIN: table,
        }
        graph.execute(pointers, workspace.data_ptr(), handle=self._handle)

    def _build(
        self, heads: int, dtype: torch.dtype, keys: Tensor, values: Tensor, rows: PrefillRows, scale: float
    ) -> Any:
        cudnn, head_dim, count = self._cudnn, keys.shape[-1], len(rows.query_lens)
        data_type = cudnn.data_type.BFLOAT16 if dtype == torch.bfloat16 else cudnn.data_type.HALF
        graph = cudnn.pygraph(
            io_data_type=data_type,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=self._handle,
        )

        def tensor(uid: int, dim: tuple[int, ...], stride: tuple[int, ...], kind: Any = data_type) -> Any:
            return graph.tensor(name=f"t{uid}", dim=dim, stride=stride, data_type=kind).set_uid(uid)

        int32, ones = cudnn.data_type.INT32, (1, 1, 1)
        shape = (count, heads, rows.max_query, head_dim)
        stride = (rows.max_query * heads * head_dim, head_dim, heads * head_dim, 1)
        query = tensor(QUERY, shape, stride)
        offsets = tensor(OFFSETS, (count + 1, *ones), (1, *ones), int32)
        query.set_ragged_offset(offsets)
        width = rows.table.shape[1]
        table = ((count, 1, width, 1), (width, width, 1, 1), int32)
        result, _ = graph.sdpa(
            q=query,
            k=tensor(KEYS, (ANY_BLOCKS, *keys.shape[1:]), keys.stride()),
            v=tensor(VALUES, (ANY_BLOCKS, *values.shape[1:]), values.stride()),
            generate_stats=False,
            attn_scale=scale,
            use_padding_mask=True,
            seq_len_q=tensor(QUERY_LENS, (count, *ones), (1, *ones), int32),
            seq_len_kv=tensor(CONTEXT_LENS, (count, *ones), (1, *ones), int32),
            diagonal_alignment=cudnn.diagonal_alignment.BOTTOM_RIGHT,
            diagonal_band_right_bound=0,
            paged_attention_k_table=tensor(TABLE, *table),
            paged_attention_v_table=tensor(TABLE_AGAIN, *table),
            paged_attention_max_seq_len_kv=rows.max_context,
            name="prefill",
        )
        result.set_uid(OUT).set_output(True).set_dim(shape).set_stride(stride).set_data_type(data_type)
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
