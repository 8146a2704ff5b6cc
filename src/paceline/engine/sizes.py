"""The knobs of `EngineConfig` whose defaults depend on the device, with those filled in."""

from dataclasses import dataclass
from typing import Literal

from paceline.engine.config import EngineConfig

DeviceType = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Each as the field of `EngineConfig` that has its name."""

    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    kv_cache_share: float
    depth: int

    @classmethod
    def of(cls, config: EngineConfig, device: DeviceType) -> "Sizes":
        default = DEFAULTS[device]
        return cls(
            block_size=config.block_size or default.block_size,
            max_num_batched_tokens=config.max_num_batched_tokens or default.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs or default.max_num_seqs,
            kv_cache_share=config.kv_cache_share or default.kv_cache_share,
            depth=config.depth or default.depth,
        )

    @property
    def max_rows(self) -> int:
        """Row ids are below this. More than ``max_num_seqs``, because a row that was given up is not reused until the
        step that says so is committed."""
        return 2 * self.max_num_seqs


# 256: rows that decode beside prompts of 2,048, of which none is then cut.
DEFAULTS: dict[DeviceType, Sizes] = {
    "cpu": Sizes(block_size=16, max_num_batched_tokens=2048, max_num_seqs=64, kv_cache_share=0.2, depth=1),
    "cuda": Sizes(block_size=64, max_num_batched_tokens=8192 + 256, max_num_seqs=1024, kv_cache_share=0.98, depth=2),
}

SERVED_TOKENS = 1024
"""``max_num_batched_tokens`` of a GPU where requests come one by one: measured in docs/performance.md."""
