"""The runner of GPUs on an emulated one, against the runner of CPUs."""

from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest
import torch
from emulated_gpu import emulated_gpu  # noqa: F401

from paceline import LLM, SamplingParams
from paceline.core import build_core, build_served_core
from paceline.engine.config import EngineConfig
from paceline.runner import decode_steps
from paceline.runner.gpu import GPURunner
from tiny_models import make_tiny

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there: its own tests are tests/gpu")

KNOBS = {
    "dtype": "float32",
    "max_num_batched_tokens": 136,
    "max_num_seqs": 6,
    "block_size": 16,
    "kv_cache_bytes": 1 << 22,
}
FAMILIES = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
}


def asks() -> tuple[list[list[int]], list[SamplingParams]]:
    """More requests than seats, prompts that are cut, and every kind of result."""
    chance = np.random.default_rng(0)
    prompts = [chance.integers(4, 200, length).tolist() for length in (5, 150, 1, 33, 139, 17, 2, 9)]
    kinds = [
        {},
        {"prompt_logprobs": 2},
        {"logprobs": 3},
        {"temperature": 0.9},
        {"temperature": 0.9, "top_k": 5},
        {"repetition_penalty": 1.5},
        {},
        {},
    ]
    return prompts, [
        SamplingParams(**{"temperature": 0, "seed": index, "max_tokens": 4 + 2 * index, "ignore_eos": True, **kind})
        for index, kind in enumerate(kinds)
    ]


def flat(logprobs) -> list[float]:
    """The numbers of a list of `TokenLogprobs`."""
    numbers = []
    for entry in logprobs or []:
        if entry is not None:
            logprob, rank, ids, others = astuple(entry)
            numbers += [logprob, rank, *ids, *others]
    return numbers


@pytest.mark.usefixtures("emulated_gpu")
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_the_cpu(family, tmp_path: Path, monkeypatch):
    make_tiny(tmp_path, family, max_position_embeddings=256, **FAMILIES[family])
    with LLM(tmp_path, device="cpu", **KNOBS) as llm:
        expected = llm.generate(*asks(), progress=False)
    calls = {"decode": 0, "mixed": 0, "pinned": 0}

    def count(what, owner, name):
        original = getattr(owner, name)

        def call(*args):
            calls[what] += 1
            return original(*args)

        monkeypatch.setattr(owner, name, call)

    with LLM(tmp_path, device="cuda", **KNOBS) as llm:
        while llm.core.idle():
            pass
        runner = llm.core._runner
        assert isinstance(runner, GPURunner)
        count("decode", runner._decodes.graphs, "replay")
        count("mixed", runner._mixes.graphs, "replay")
        count("pinned", decode_steps, "pinned")
        found = llm.generate(*asks(), progress=False)
    assert calls["mixed"] > 3, "steps with several tokens a row are captured too"
    assert calls["decode"] > calls["pinned"] > 3, "rows that go on need no input"
    for got, wanted in zip(found, expected, strict=True):
        assert got.outputs[0].token_ids == wanted.outputs[0].token_ids
        assert flat(got.outputs[0].logprobs) == pytest.approx(flat(wanted.outputs[0].logprobs), abs=1e-4)
        assert flat(got.prompt_logprobs) == pytest.approx(flat(wanted.prompt_logprobs), abs=1e-4)
    assert flat(found[1].prompt_logprobs)
    assert flat(found[2].outputs[0].logprobs)


@pytest.mark.usefixtures("emulated_gpu")
@pytest.mark.parametrize(
    ("build", "asked", "budget"),
    [(build_core, None, 8448), (build_served_core, None, 1024), (build_served_core, 136, 136)],
)
def test_step_budget_of_a_server(build, asked, budget, tmp_path: Path):
    """A smaller default than of batches, as docs/engine.md states."""
    make_tiny(tmp_path, "llama", max_position_embeddings=64)
    knobs = {"max_num_seqs": 2, "block_size": 16, "kv_cache_bytes": 1 << 20}
    config = EngineConfig(model=str(tmp_path), device="cuda", max_num_batched_tokens=asked, **knobs)
    core = build(config)
    assert core._runner.sizes.max_num_batched_tokens == core._scheduler.max_num_batched_tokens == budget
    core.close()
