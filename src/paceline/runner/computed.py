"""What a forward pass leaves on the device."""

from typing import NamedTuple

from torch import Tensor


class Computed(NamedTuple):
    """Of a step; valid until the next one is launched."""

    hidden: Tensor
    """``[T or more, hidden]``: after the last norm, of the step's tokens in their order."""
    logits: Tensor
    """``[n, vocab]``: scores of the rows that sample."""
    rows: Tensor
    """int32 ``[n]``: those rows."""
    positions: Tensor
    """int32 ``[n]``: where their next tokens will stand."""
