"""The log of steps: what is in it, and that it changes nothing."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from fake_runner import FakeRunner
from paceline.core import EngineCore, assemble
from paceline.engine import step_log
from paceline.engine.config import EngineConfig, InvalidConfig
from paceline.engine.limits import Limits
from paceline.engine.request import Request
from paceline.engine.sampling_params import SamplingParams
from paceline.engine.sizes import Sizes
from paceline.engine.step import KVGroup, Step
from paceline.engine.step_log import read_step_log

SIZES = Sizes(block_size=4, max_num_batched_tokens=64, max_num_seqs=16, kv_cache_share=0.2, depth=2)


class Clock:
    seconds = 50.0


class Late:
    """A handle that waits."""

    def __init__(self, value, until):
        self.value, self.until = value, until

    def result(self):
        Clock.seconds = max(Clock.seconds, self.until)
        return self.value.result()


class PacedRunner(FakeRunner):
    """A device that takes 20 ms a step, one step after the other."""

    free = 0.0

    def submit(self, step: Step):  # type: ignore[override]
        self.free = max(self.free, Clock.seconds) + 0.02
        return Late(super().submit(step), self.free)


def core(log: Path | None) -> EngineCore:
    config = EngineConfig(model="m", step_log=None if log is None else str(log))
    return assemble(config, SIZES, PacedRunner([KVGroup(None, 64)]), Limits(97, 200), ())


def answers(core: EngineCore) -> list[list[int]]:
    for number in range(2):
        params = SamplingParams(max_tokens=4)
        core.add(Request(id=number, prompt=[3, number, 5], params=params, seed=0, arrival=0.0))
    ids: list[list[int]] = [[], []]
    while core.has_work:
        for output in core.step():
            ids[output.request] += output.ids
    core.check_idle()
    core.close()
    return ids


def test_work_and_durations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_log, "time", SimpleNamespace(monotonic=lambda: Clock.seconds))
    path = tmp_path / "steps.jsonl"
    logged, plain = answers(core(path)), answers(core(None))
    assert logged == plain
    steps = read_step_log(path)
    assert [(s.work.tokens, s.work.rows, s.work.kv_tokens, s.work.prompt_pairs) for s in steps] == [
        (6, 2, 0, 12),
        (2, 2, 8, 0),
        (2, 2, 10, 0),
        (2, 2, 12, 0),
    ]
    # With two steps under way each counts from the end of the one before.
    assert [step.seconds for step in steps] == pytest.approx([0.02] * 4)


def test_a_log_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    answers(core(path))
    whole = path.read_text()
    path.write_text(whole[:-9])
    assert len(read_step_log(path)) == 3
    path.write_text("{}\n" + whole)
    with pytest.raises(ValueError, match="line 1: is no step"):
        read_step_log(path)


def test_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"^step_log: cannot write .*: No such file"):
        core(tmp_path / "none" / "steps.jsonl")
