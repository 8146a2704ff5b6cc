"""From a config to an engine core: the only module that imports both the engine and the runners."""

from collections.abc import Callable, Sequence

from paceline.engine.config import EngineConfig
from paceline.engine.engine_core import EngineCore
from paceline.engine.limits import Limits
from paceline.engine.scheduler import Scheduler
from paceline.engine.sizes import Sizes
from paceline.engine.step import Runner

__all__ = ["EngineCore", "Progress", "assemble", "build_core"]

Progress = Callable[[str, float], None]
"""Called with what is being done and the share of it that is done, 0 to 1."""


def build_core(config: EngineConfig, progress: Progress | None = None) -> EngineCore:
    """Loads the model that ``config`` names and makes an engine of it."""
    from paceline.checkpoint.checkpoint import open_checkpoint
    from paceline.checkpoint.source import locate
    from paceline.runner.make_runner import make_runner

    checkpoint = open_checkpoint(locate(config.model))
    runner = make_runner(config, checkpoint, progress)
    return assemble(config, runner.sizes, runner, runner.limits, checkpoint.generation.eos_ids)


def assemble(config: EngineConfig, sizes: Sizes, runner: Runner, limits: Limits, eos_ids: Sequence[int]) -> EngineCore:
    """Joins a runner with a scheduler that knows its limits."""
    scheduler = Scheduler(
        runner.kv_groups,
        block_size=sizes.block_size,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_num_seqs=sizes.max_num_seqs,
        max_rows=sizes.max_rows,
        max_model_len=limits.max_model_len,
        eos_ids=eos_ids,
        prefix_cache=config.prefix_cache,
    )
    return EngineCore(scheduler, runner, sizes.depth, limits)
