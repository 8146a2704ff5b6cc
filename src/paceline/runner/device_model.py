"""What steps on a GPU compute with."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paceline.models.decoder import Decoder
from paceline.runner.device_rows import DeviceRows


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """A decoder with its rows and what it remembers of them."""

    decoder: Decoder
    cache: Any
    """`Decoder.make_cache`'s."""
    rows: DeviceRows
    last_token: Tensor
    """What each row sampled last, as `DeviceSampler` keeps it."""
    block_size: int
    max_context: int
    """Tokens of a row."""
