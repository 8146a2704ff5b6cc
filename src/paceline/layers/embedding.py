"""The embedding."""

import torch.nn.functional as F
from torch import Tensor


def embed(tokens: Tensor, weight: Tensor) -> Tensor:
    """Rows of ``weight`` ``[V, hidden]`` for ids ``[T]`` below V: ``[T, hidden]``, in memory of its own."""
    if not weight.is_cuda:
        return F.embedding(tokens, weight)
    from paceline.kernels.triton.embedding import embedding
    from paceline.layers.gpu_linear import overlaps

    return embedding(tokens, weight, pdl=overlaps(len(tokens)))
