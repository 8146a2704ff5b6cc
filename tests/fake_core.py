"""An engine core over the fake runner: no model, no torch."""

import time

from fake_runner import Done, FakeRunner
from paceline.core import EngineCore
from paceline.engine.limits import Limits
from paceline.engine.scheduler import Scheduler
from paceline.engine.step import KVGroup, Step


class SlowRunner(FakeRunner):
    """Takes ``delay_s`` for every step."""

    delay_s = 0.0

    def submit(self, step: Step) -> Done:
        time.sleep(self.delay_s)
        return super().submit(step)


def fake_core(
    *,
    num_blocks: int = 256,
    block_size: int = 4,
    depth: int = 1,
    delay_s: float = 0.0,
    windows: tuple[int | None, ...] = (None,),
    vocab_size: int = 97,
    max_num_batched_tokens: int = 64,
    max_num_seqs: int = 16,
    max_model_len: int = 256,
    eos_ids: tuple[int, ...] = (),
    prefix_cache: bool = True,
    sampled_by_seed: bool = False,
) -> EngineCore:
    """A core whose tokens `fake_runner.next_token` predicts."""
    groups = [KVGroup(window, num_blocks) for window in windows]
    runner = SlowRunner(groups, block_size, vocab_size, sampled_by_seed)
    runner.delay_s = delay_s
    scheduler = Scheduler(
        groups,
        block_size=block_size,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_rows=2 * max_num_seqs,
        max_model_len=max_model_len,
        eos_ids=eos_ids,
        prefix_cache=prefix_cache,
    )
    return EngineCore(scheduler, runner, depth, Limits(vocab_size, max_model_len))
