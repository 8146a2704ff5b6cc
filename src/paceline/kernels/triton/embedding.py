"""Rows of the embedding."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_BLOCK = 1024
"""Elements that one program copies."""


@triton.jit
def _embedding_kernel(tokens, weight, out, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    if PDL:
        # In this order: decode attention, some launches behind, reads lengths and tables before it waits, so nothing
        # behind this kernel may start before the one that writes them has ended.
        gdc_wait()
        gdc_launch_dependents()
    token = tl.load(tokens + i).to(tl.int64)
    tl.store(out + i * width + column, tl.load(weight + token * width + column, mask=inside), mask=inside)


def embedding(tokens: Tensor, weight: Tensor, *, pdl: bool = False) -> Tensor:
    """As `torch.nn.functional.embedding`.

    Args:
        tokens: int32 ``[T]``, ids below V.
        weight: ``[V, hidden]``, contiguous.
        pdl: start while the kernel before still runs (programmatic dependent launch).

    Returns:
        ``[T, hidden]``.
    """
    assert weight.is_contiguous()
    width = weight.shape[1]
    out = torch.empty(len(tokens), width, dtype=weight.dtype, device=weight.device)
    if len(tokens):
        _embedding_kernel[(len(tokens), triton.cdiv(width, _BLOCK))](
            tokens, weight, out, width, BLOCK=_BLOCK, PDL=pdl, num_warps=4, **({"launch_pdl": True} if pdl else {})
        )
    return out
