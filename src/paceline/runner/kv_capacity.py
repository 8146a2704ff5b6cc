"""How many KV blocks to make, and how long a sequence may therefore become."""

import logging
from dataclasses import dataclass

from paceline.engine.config import EngineConfig, InvalidConfig
from paceline.engine.sizes import Sizes
from paceline.layers.kv_cache import KVLayout
from paceline.runner.rows import table_bytes

log = logging.getLogger(__name__)

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class KVCapacity:
    num_blocks: int
    """Blocks of every KV group, the sink included."""
    max_model_len: int
    """Most tokens of one sequence."""
    bytes: int
    """Memory that all groups take."""


def kv_capacity(
    config: EngineConfig,
    sizes: Sizes,
    layout: KVLayout,
    max_position: int,
    available: int,
    *,
    working: int = 0,
    host: int | None = None,
) -> KVCapacity:
    """Fits the KV cache into memory; takes no more than ``max_num_seqs`` sequences of full length can use.

    All groups get the same number of blocks: a sequence is admitted with a block of every group for each of its tokens.

    Args:
        max_position: longest context that the model was made for.
        available: bytes of the device's memory that are free.
        working: bytes of them that steps take, on a GPU.
        host: bytes of the host's memory that are free, if that is another.

    Raises:
        InvalidConfig: ``max_model_len`` was asked for and does not fit, or not even one block does; or the tables of
            ``max_num_seqs`` sequences do not; or a GPU lacks the memory that was asked for.
    """
    length = config.max_model_len or max_position
    if length > max_position:
        raise InvalidConfig(
            f"max_model_len={length} is more than the {max_position} tokens that the model was made for"
        )
    block_bytes = sum(layout.bytes_per_block(group) for group in range(layout.num_groups))
    needs = f", of which steps take {working / MIB:,.0f} MiB," if working else ""
    if config.kv_cache_bytes is None:
        budget = max(0, int(available * sizes.kv_cache_share) - working)
        source = f"kv_cache_share={sizes.kv_cache_share:g} of {available / MIB:,.0f} MiB of free memory{needs}"
    else:
        budget = config.kv_cache_bytes
        source = f"kv_cache_bytes={budget}"
        if budget > available - working:
            message = f"{source} is more than the {(available - working) / MIB:,.0f} MiB of memory that are free"
            if host is not None:
                raise InvalidConfig(message)
            log.warning(message)
    sequence_blocks = -(-length // layout.block_size)
    num_blocks = min(budget // block_bytes, sizes.max_num_seqs * sequence_blocks + 1)
    capacity = (num_blocks - 1) * layout.block_size
    if capacity < length:
        needed = (sequence_blocks + 1) * block_bytes
        if config.max_model_len is not None or capacity < 1:
            raise InvalidConfig(
                f"one sequence of {length} tokens takes {needed / MIB:,.1f} MiB of KV cache, and {source} gives "
                f"{budget / MIB:,.1f} MiB: give the KV cache more memory or lower max_model_len"
            )
        log.warning(
            "max_model_len is %d instead of the model's %d: %s holds no more; a whole sequence takes %.0f MiB",
            capacity,
            length,
            source,
            needed / MIB,
        )
        length = capacity
    tables = table_bytes(sizes.max_rows, length, layout.block_size, layout.num_groups)
    free = available if config.kv_cache_bytes is not None else available - num_blocks * block_bytes
    if host is not None:
        free = host
    if tables > free:
        raise InvalidConfig(
            f"max_num_seqs={sizes.max_num_seqs} sequences of {length} tokens take {tables / MIB:,.1f} MiB for their "
            f"tokens and block tables, and {free / MIB:,.1f} MiB are free: lower max_num_seqs or max_model_len"
        )
    return KVCapacity(num_blocks, length, num_blocks * block_bytes)
