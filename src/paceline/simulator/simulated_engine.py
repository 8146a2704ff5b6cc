"""A clock runner in real time, for an engine that serves."""

from dataclasses import dataclass, fields, replace

from paceline.engine.config import EngineConfig, InvalidConfig
from paceline.engine.detokenizer import TokenBytes
from paceline.engine.sizes import DEFAULTS, Sizes
from paceline.engine.step import KVGroup
from paceline.simulator.clock import RealClock
from paceline.simulator.clock_runner import ClockRunner
from paceline.simulator.gpu_model import EngineSizes, GpuModel

MEANT = {"model", "simulate", "step_log", "prefix_cache", *(field.name for field in fields(EngineSizes))}
"""Knobs that mean something without a device."""
MOST_IDS = 1024
"""Different tokens that a simulated model says."""


@dataclass(frozen=True, slots=True)
class SimulatedEngine:
    runner: ClockRunner
    sizes: Sizes
    max_model_len: int


def simulated_engine(config: EngineConfig, tokens: TokenBytes, vocab_size: int) -> SimulatedEngine:
    """An engine whose steps take the time that the model of ``config.simulate`` says.

    Args:
        config: sizes given here replace those of the model.
        tokens: of the tokenizer; plain ASCII among them is what the model says.
        vocab_size: ids are below this.

    Raises:
        InvalidConfig: no such model, a size that does not fit, or a knob that a clock cannot obey.
    """
    assert config.simulate is not None
    for field in fields(config):
        if field.name not in MEANT and getattr(config, field.name) != field.default:
            raise InvalidConfig(f"{field.name}: has no meaning with simulate")
    given = {field.name: getattr(config, field.name, None) for field in fields(EngineSizes)}
    try:
        model = GpuModel.load(config.simulate)
        engine = replace(model.engine, **{name: size for name, size in given.items() if size is not None})
    except ValueError as error:
        raise InvalidConfig(f"simulate: {error}") from error
    sizes = Sizes(
        block_size=engine.block_size,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_num_seqs=engine.max_num_seqs,
        kv_cache_share=DEFAULTS["cpu"].kv_cache_share,
        depth=engine.depth,
    )
    groups = [KVGroup(None, engine.num_blocks)]
    vocabulary = plain_ids(tokens, vocab_size)
    runner = ClockRunner(model.step_time, RealClock(), groups, engine.block_size, vocabulary)
    return SimulatedEngine(runner, sizes, engine.max_model_len)


def plain_ids(tokens: TokenBytes, vocab_size: int) -> list[int]:
    """The first ids that stand for letters, digits and spaces; all, where none do."""
    ids: list[int] = []
    for token in range(vocab_size):
        text = tokens[token].decode("ascii", "replace")
        if text.isascii() and text.replace(" ", "").isalnum():
            ids.append(token)
            if len(ids) == MOST_IDS:
                break
    return ids or list(range(vocab_size))
