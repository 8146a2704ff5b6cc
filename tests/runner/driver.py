"""Drives a runner by hand-written steps, with the simplest possible blocks: every row has its own range of them."""

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from paceline.checkpoint.checkpoint import open_checkpoint
from paceline.engine.config import EngineConfig
from paceline.engine.sampling_params import SamplingParams
from paceline.engine.step import RowStart, Step, StepResult
from paceline.runner.cpu import CPURunner

BLOCK_SIZE = 4
BLOCKS_PER_ROW = 40


def tiny_runner(folder: Path, **fields: Any) -> CPURunner:
    """A float32 runner with room for 8 rows of ``BLOCKS_PER_ROW`` blocks."""
    defaults = {
        "max_num_seqs": 8,
        "block_size": BLOCK_SIZE,
        "dtype": "float32",
        "max_model_len": BLOCK_SIZE * BLOCKS_PER_ROW,
        "threads": 1,
    }
    return CPURunner(EngineConfig(model=str(folder), **{**defaults, **fields}), open_checkpoint(folder))


def own_blocks(row: int, tokens: int) -> list[int]:
    """Blocks of a row for so many tokens."""
    first = 1 + row * BLOCKS_PER_ROW
    return list(range(first, first - (-tokens // BLOCK_SIZE)))


class Driver:
    """Sends steps and keeps each row's tokens, as the scheduler would."""

    def __init__(self, runner: CPURunner) -> None:
        self.runner = runner
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list] = {}
        self.prompt_logprobs: dict[int, list] = {}
        self._next = 0

    def start(
        self,
        row: int,
        tokens: Sequence[int],
        *,
        room: int = BLOCK_SIZE * BLOCKS_PER_ROW,
        prompt_len: int | None = None,
        computed: int = 0,
        blocks: list[list[int]] | None = None,
        seed: int = 0,
        stop_ids: Sequence[int] = (),
        prompt_logprobs: int | None = None,
        **params: Any,
    ) -> RowStart:
        """Start of a row, with blocks for ``room`` tokens; greedy unless ``params`` say otherwise."""
        self.tokens[row] = list(tokens)
        return RowStart(
            row=row,
            tokens=list(tokens),
            prompt_len=len(tokens) if prompt_len is None else prompt_len,
            computed=computed,
            blocks=blocks or [own_blocks(row, room) for _ in self.runner.kv_groups],
            params=SamplingParams(**{"temperature": 0.0, "max_tokens": None, **params}),
            seed=seed,
            candidate=0,
            stop_ids=list(stop_ids),
            prompt_logprobs=prompt_logprobs,
        )

    def submit(self, **fields: Any) -> Future[StepResult]:
        self._next += 1
        return self.runner.submit(Step(self._next - 1, **fields))

    def take(self, result: StepResult) -> StepResult:
        assert result.counts == [1] * len(result.rows)
        for row, token in zip(result.rows, result.ids, strict=True):
            self.tokens[row].append(token)
        for row, entries in result.logprobs.items():
            self.logprobs.setdefault(row, []).extend(entries)
        for row, (first, entries) in result.prompt_logprobs.items():
            known = self.prompt_logprobs.setdefault(row, [])
            assert first == len(known) + 1
            known.extend(entries)
        return result

    def step(self, **fields: Any) -> StepResult:
        return self.take(self.submit(**fields).result())

    def generate(self, prompt: Sequence[int], count: int, row: int = 0, chunk: int = 10**9, **fields: Any) -> list[int]:
        """``count`` tokens after a prompt, alone in the runner, computed in chunks."""
        start = self.start(row, prompt, **fields)
        left = len(start.tokens) - start.computed
        added = [start]
        while left:
            self.step(added=added, advance={row: min(chunk, left)})
            added = []
            left -= min(chunk, left)
        for _ in range(count - 1):
            self.step()
        self.step(removed=[row])
        return self.tokens[row][len(prompt) :]
