"""The CPU runner, driven by hand-written steps, against transformers on the same weights."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from driver import BLOCK_SIZE, Driver, own_blocks, tiny_runner
from transformers import PreTrainedModel

from paceline.engine.config import InvalidConfig
from paceline.kernels.logprobs import LOGPROB_ROWS
from paceline.kernels.ranking import ranked
from paceline.runner.cpu import CPURunner
from tiny_models import make_tiny, tiny_tokenizer

VOCAB = tiny_tokenizer().get_vocab_size()
FAMILIES = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tied": True}),
    "mistral-window": ("mistral", {"sliding_window": 10}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Iterator[dict[str, tuple[Path, PreTrainedModel]]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models")
    yield {
        name: (folder / name, make_tiny(folder / name, family, **overrides))
        for name, (family, overrides) in FAMILIES.items()
    }
    torch.set_num_threads(threads)


@pytest.fixture
def runner(models) -> Iterator[CPURunner]:
    runner = tiny_runner(models["llama"][0])
    yield runner
    runner.close()


@pytest.fixture
def reference(models) -> PreTrainedModel:
    return models["llama"][1]


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def greedy(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return output[0, len(prompt) :].tolist()


def reference_logprobs(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """``[len(tokens), vocab]``: row p predicts token p + 1."""
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)


def test_more_threads_than_the_machine_can_run(models):
    cores = os.cpu_count() or 1
    tiny_runner(models["llama"][0], threads=4 * cores).close()
    with pytest.raises(InvalidConfig, match=r"^threads: "):
        tiny_runner(models["llama"][0], threads=4 * cores + 1)


# Equality with transformers


@pytest.mark.parametrize("chunk", [10**9, 7, 1])
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_equal_transformers(models, name, chunk):
    folder, model = models[name]
    runner = tiny_runner(folder)
    driver = Driver(runner)
    for length in (1, BLOCK_SIZE, 21):
        prompt = random_prompt(length, seed=length)
        assert driver.generate(prompt, 16, chunk=chunk) == greedy(model, prompt, 16)
    runner.close()


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
@pytest.mark.parametrize("chunk", [10**9, 5])
def test_prompt_logprobs_equal_transformers(models, name, chunk):
    folder, model = models[name]
    runner = tiny_runner(folder)
    driver = Driver(runner)
    prompt = random_prompt(30, seed=3)
    driver.generate(prompt, 2, chunk=chunk, prompt_logprobs=3, logprobs=2)
    expected = reference_logprobs(model, driver.tokens[0])
    entries = driver.prompt_logprobs[0] + driver.logprobs[0]
    assert len(driver.prompt_logprobs[0]) == 29
    for position, entry in enumerate(entries, 1):
        row, token = expected[position - 1], driver.tokens[0][position]
        assert entry.logprob == pytest.approx(row[token].item(), abs=2e-4)
        assert entry.rank == 1 + int((row > row[token]).sum())
        values, ids = ranked(row[None], 3 if position < 30 else 2)
        assert entry.top_ids == ids[0].tolist()
        assert entry.top_logprobs == pytest.approx(values[0].tolist(), abs=2e-4)
    runner.close()


def test_rows_at_different_phases(runner, reference):
    """One row decodes while another's prompt comes in chunks and a third comes and goes; a row id is used twice."""
    driver = Driver(runner)
    prompts = {0: random_prompt(6, 1), 1: random_prompt(13, 2), 2: random_prompt(3, 4)}
    driver.step(added=[driver.start(0, prompts[0])], advance={0: 6})
    driver.step(added=[driver.start(1, prompts[1]), driver.start(2, prompts[2])], advance={1: 5, 2: 3})
    driver.step(advance={1: 7, 2: 0})
    driver.step()
    driver.step()
    assert driver.tokens[2][3:] == greedy(reference, prompts[2], 3)
    again = random_prompt(9, 5)
    driver.step(removed=[2], added=[driver.start(2, again)], advance={2: 9, 0: 0})
    for _ in range(5):
        driver.step()
    for row, prompt in ((0, prompts[0]), (1, prompts[1]), (2, again)):
        output = driver.tokens[row][len(prompt) :]
        assert output == greedy(reference, prompt, len(output))
        assert len(output) >= 6


def test_steps_submitted_before_earlier_results_are_read(runner, reference):
    """Depth 2: the sampled token goes straight into the next step; nothing of it passes through the caller."""
    driver = Driver(runner)
    prompt, other = random_prompt(5, 1), random_prompt(8, 2)
    handles = [driver.submit(added=[driver.start(0, prompt)], advance={0: 5})]
    handles.append(driver.submit(added=[driver.start(1, other)], advance={1: 8}))
    handles += [driver.submit() for _ in range(6)]
    handles.append(driver.submit(removed=[0]))
    for handle in handles:
        driver.take(handle.result())
    assert driver.tokens[0][5:] == greedy(reference, prompt, 8)
    assert driver.tokens[1][8:] == greedy(reference, other, 8)


def test_blocks_that_arrive_as_a_row_grows(runner, reference):
    driver = Driver(runner)
    prompt = random_prompt(3, 1)
    driver.step(added=[driver.start(0, prompt, room=3)], advance={0: 3})
    for length in range(4, 14):
        blocks = {0: [[own_blocks(0, length)[-1]]]} if length % BLOCK_SIZE == 1 else {}
        driver.step(blocks=blocks)
    assert driver.tokens[0][3:] == greedy(reference, prompt, 11)


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_rows_that_share_blocks(models, name):
    """A prefix hit: the second row reads what the first one computed."""
    folder, model = models[name]
    runner = tiny_runner(folder)
    driver = Driver(runner)
    prefix = random_prompt(2 * BLOCK_SIZE, 1)
    first, second = [*prefix, *random_prompt(3, 2)], [*prefix, *random_prompt(5, 3)]
    driver.step(added=[driver.start(0, first)], advance={0: len(first)})
    blocks = [own_blocks(0, 100)[:2] + own_blocks(1, 100) for _ in runner.kv_groups]
    driver.step(added=[driver.start(1, second, computed=len(prefix), blocks=blocks)], advance={1: 5})
    for _ in range(5):
        driver.step()
    assert driver.tokens[0][len(first) :] == greedy(model, first, 7)
    assert driver.tokens[1][len(second) :] == greedy(model, second, 6)
    runner.close()


# Sampling in the runner

SAMPLED = {
    "greedy": {"logprobs": 2},
    "seeded": {"temperature": 1.0, "seed": 42, "logprobs": 1},
    "penalties": {
        "temperature": 0.9,
        "top_p": 0.95,
        "seed": -7,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.5,
    },
    "greedy penalties": {"repetition_penalty": 2.0},
    "filters": {"temperature": 1.3, "top_k": 30, "min_p": 0.02, "seed": 2**62},
    "min_tokens": {"temperature": 1.0, "seed": 3, "min_tokens": 15, "stop_ids": list(range(5, 100))},
}


@pytest.mark.parametrize("fields", SAMPLED.values(), ids=SAMPLED)
def test_resuming_changes_nothing(runner, fields):
    """failure 61: preempted after 9 tokens, then all its tokens are computed again, in chunks, in another row."""
    prompt = random_prompt(7, 9)
    whole = Driver(runner)
    expected = whole.generate(prompt, 20, **fields)
    driver = Driver(runner)
    driver._next = whole._next
    begun = driver.generate(prompt, 9, row=2, **fields)
    resumed = driver.generate([*prompt, *begun], 11, row=5, prompt_len=7, chunk=4, **fields)
    assert begun + resumed == expected
    if "logprobs" in fields:
        pieces = driver.logprobs[2] + driver.logprobs[5]
        assert [entry.rank for entry in pieces] == [entry.rank for entry in whole.logprobs[0]]
        assert [entry.logprob for entry in pieces] == pytest.approx(
            [entry.logprob for entry in whole.logprobs[0]], abs=1e-4
        )
    assert not runner._slots


def test_neighbours_change_nothing(runner):
    """failure 26: rows with all kinds of parameters, alone and together, before and after a neighbour left."""
    prompts = [random_prompt(4 + index, index) for index in range(len(SAMPLED))]
    alone = []
    driver = Driver(runner)
    for prompt, fields in zip(prompts, SAMPLED.values(), strict=True):
        alone.append(driver.generate(prompt, 12, **fields))
    for order in (range(len(SAMPLED)), range(len(SAMPLED) - 1, -1, -1)):
        fields = list(SAMPLED.values())
        added = [driver.start(row, prompts[row], **fields[row]) for row in order]
        driver.step(added=added, advance={row: len(prompts[row]) for row in order})
        for _ in range(5):
            driver.step()
        gone = order[1]
        driver.step(removed=[gone])
        for _ in range(5):
            driver.step()
        for row in order:
            output = driver.tokens[row][len(prompts[row]) :]
            assert output == (alone[row][:6] if row == gone else alone[row])
        driver.step(removed=[row for row in order if row != gone])


def test_ids_beyond_the_tokenizer(tmp_path):
    """failure 29: the head has more rows than the tokenizer has ids; they are never sampled, yet accepted as input."""
    make_tiny(tmp_path, "llama", vocab_size=VOCAB + 200)
    runner = tiny_runner(tmp_path)
    assert runner.limits.vocab_size == VOCAB + 200
    driver = Driver(runner)
    output = driver.generate([VOCAB + 150, 5], 60, temperature=100.0, seed=1, logprobs=5)
    assert max(output) < VOCAB
    assert all(token < VOCAB for entry in driver.logprobs[0] for token in entry.top_ids)
    assert len(driver.generate(output, 3, row=1)) == 3
    runner.close()


def test_a_row_without_any_possible_token(tmp_path):
    make_tiny(tmp_path, "llama", vocab_size=VOCAB + 8)
    runner = tiny_runner(tmp_path)
    driver = Driver(runner)
    added = [driver.start(0, [5, 6], allowed_token_ids=(VOCAB + 1,)), driver.start(1, [5, 6])]
    result = driver.step(added=added, advance={0: 2, 1: 2})
    assert list(result.errors) == [0]
    assert "no token may be sampled" in result.errors[0]
    assert result.rows == [1]
    runner.close()


def test_a_row_with_bad_logits_fails_alone(runner, reference):
    """Others go on, also over blocks that held its NaN; steps already under way may still name it."""
    driver = Driver(runner)
    poison = 77
    prompt = [token for token in random_prompt(12, 1) if token != poison]
    assert poison not in greedy(reference, prompt, 8)
    with torch.inference_mode():
        runner._decoder._embedding[poison] = torch.nan
    added = [driver.start(0, prompt), driver.start(1, [4, poison, 6, 7, 8, 9], logprobs=1), driver.start(2, prompt)]
    handles = [driver.submit(added=added, advance={row: len(driver.tokens[row]) for row in range(3)}), driver.submit()]
    first, second = (driver.take(handle.result()) for handle in handles)
    assert first.errors == {1: "the model's logits are not finite"}
    assert first.rows == second.rows == [0, 2]
    assert not second.errors
    driver.step(removed=[1], added=[driver.start(1, prompt[:2])], advance={1: 2})
    for _ in range(5):
        driver.step()
    for row in (0, 2):
        assert driver.tokens[row][len(prompt) :] == greedy(reference, prompt, 8)
    assert driver.tokens[1][2:] == greedy(reference, prompt[:2], 6)


def test_long_prompts_never_hold_all_their_logits(runner, monkeypatch):
    """failure 86: prompt logprobs are computed a bounded number of positions at a time."""
    seen = []
    logits = runner._decoder.logits

    def counted(hidden):
        seen.append(len(hidden))
        return logits(hidden)

    monkeypatch.setattr(runner._decoder, "logits", counted)
    driver = Driver(runner)
    driver.generate(random_prompt(159), 1, prompt_logprobs=20)
    assert len(driver.prompt_logprobs[0]) == 158
    assert seen == [LOGPROB_ROWS, LOGPROB_ROWS, 158 - 2 * LOGPROB_ROWS, 1]


# Behaviour


def test_submit_returns_at_once(runner, monkeypatch):
    release = threading.Event()
    forward = runner._decoder.forward

    def slow(*arguments):
        assert release.wait(10)
        return forward(*arguments)

    monkeypatch.setattr(runner._decoder, "forward", slow)
    driver = Driver(runner)
    handle = driver.submit(added=[driver.start(0, [1, 2])], advance={0: 2})
    later = driver.submit()
    assert not handle.done()
    release.set()
    assert handle.result().rows == later.result().rows == [0]


def test_a_failing_step_is_told_by_its_handle_and_all_later_ones(runner, monkeypatch):
    def fail(*_):
        raise MemoryError("out of memory")

    monkeypatch.setattr(runner._decoder, "forward", fail)
    driver = Driver(runner)
    first, second = driver.submit(added=[driver.start(0, [1])]), driver.submit()
    with pytest.raises(MemoryError, match="out of memory"):
        first.result()
    with pytest.raises(RuntimeError, match="an earlier step failed"):
        second.result()


def test_a_full_context_still_samples(models):
    runner = tiny_runner(models["llama"][0], max_model_len=12)
    driver = Driver(runner)
    assert runner.limits.max_model_len == 12
    assert len(driver.generate(random_prompt(12), 1, room=12)) == 1
    runner.close()


def test_context_shrinks_to_what_the_cache_holds(models):
    folder = models["llama"][0]
    runner = tiny_runner(folder, max_model_len=None, kv_cache_bytes=20 * BLOCK_SIZE * 2 * 2 * 2 * 16 * 4)
    assert [group.num_blocks for group in runner.kv_groups] == [20]
    assert runner.limits.max_model_len == 19 * BLOCK_SIZE
    runner.close()
    with pytest.raises(ValueError, match="max_model_len"):
        tiny_runner(folder, max_model_len=77, kv_cache_bytes=20 * BLOCK_SIZE * 2 * 2 * 2 * 16 * 4)


def test_threads_are_set_in_the_thread_that_computes(models):
    runner = tiny_runner(models["llama"][0], threads=2)
    assert runner._worker.submit(torch.get_num_threads).result() == 2
    runner.close()
