"""From a config to an engine core: the only module that imports both the engine and the runners."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.engine.config import EngineConfig
from paceline.engine.engine_core import EngineCore
from paceline.engine.limits import Limits
from paceline.engine.scheduler import Scheduler
from paceline.engine.sizes import SERVED_TOKENS, Sizes
from paceline.engine.step import Runner
from paceline.engine.step_log import LoggingRunner

if TYPE_CHECKING:
    from paceline.checkpoint.tokenizer import Tokenizer

__all__ = ["EngineCore", "Progress", "assemble", "build_core", "build_served_core"]

Progress = Callable[[str, float], None]
"""Called with what is being done and the share of it that is done, 0 to 1."""


def build_core(config: EngineConfig, progress: Progress | None = None) -> EngineCore:
    """Loads the model that ``config`` names, or simulates it, and makes an engine of it."""
    from paceline.checkpoint.checkpoint import open_checkpoint
    from paceline.checkpoint.source import locate

    checkpoint = open_checkpoint(locate(config.model))
    eos_ids = checkpoint.generation.eos_ids
    if config.simulate is not None:
        return _simulated(config, checkpoint.tokenizer(), eos_ids)
    from paceline.runner.make_runner import make_runner

    runner = make_runner(config, checkpoint, progress)
    return assemble(config, runner.sizes, runner, runner.limits, eos_ids)


def build_served_core(config: EngineConfig, progress: Progress | None = None) -> EngineCore:
    """`build_core` for requests that come one by one, whose users wait for every token: by default a GPU's steps are
    smaller (`SERVED_TOKENS`)."""
    if config.max_num_batched_tokens is None and config.simulate is None:
        from paceline.runner.make_runner import device_type

        if device_type(config) == "cuda":
            config = replace(config, max_num_batched_tokens=SERVED_TOKENS)
    return build_core(config, progress)


def _simulated(config: EngineConfig, tokenizer: "Tokenizer", eos_ids: Sequence[int]) -> EngineCore:
    from paceline.engine.detokenizer import token_bytes
    from paceline.simulator.simulated_engine import simulated_engine

    size = tokenizer.vocab_size
    engine = simulated_engine(config, token_bytes(tokenizer.backend), size)
    return assemble(config, engine.sizes, engine.runner, Limits(size, engine.max_model_len), eos_ids)


def assemble(config: EngineConfig, sizes: Sizes, runner: Runner, limits: Limits, eos_ids: Sequence[int]) -> EngineCore:
    """Joins a runner with a scheduler that knows its limits, and logs its steps if ``config`` says so."""
    if config.step_log is not None:
        runner = LoggingRunner(runner, Path(config.step_log), sizes.block_size)
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
