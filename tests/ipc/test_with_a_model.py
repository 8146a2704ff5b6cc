"""The Python API with a real model, tiny and random: the same answers in process, from the engine process, and by
transformers."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from paceline import LLM, AsyncLLM, SamplingParams
from paceline.checkpoint.tokenizer import Tokenizer
from paceline.engine.config import EngineConfig
from paceline.engine.output import RequestOutput
from paceline.ipc.errors import EngineDead
from tiny_models import make_tiny

PROMPTS = ["hello world", "the user and the assistant", "x", "hello hello hello hello hello hello"]
KNOBS: dict[str, Any] = {"dtype": "float32", "threads": 1, "kv_cache_bytes": 4 << 20, "max_num_batched_tokens": 16}
MESSAGES = [{"role": "user", "content": "hello"}]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SAMPLED = [SamplingParams(n=2, seed=seed, max_tokens=12, logprobs=2, top_p=0.9) for seed in range(len(PROMPTS))]


@dataclass
class Answers:
    """To all prompts, first greedy, then sampled; and to the messages."""

    reference: PreTrainedModel
    tokenizer: Tokenizer
    in_process: list[RequestOutput]
    chat: RequestOutput
    served: list[RequestOutput]
    leaks: int


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    folder = tmp_path_factory.mktemp("models") / "llama"
    reference = make_tiny(folder, "llama")
    prompts, params = PROMPTS * 2, [GREEDY] * len(PROMPTS) + SAMPLED
    with LLM(str(folder), **KNOBS) as llm:
        in_process = llm.generate(prompts, params)
        chat = llm.chat(MESSAGES, GREEDY)[0]

    async def serve() -> tuple[list[RequestOutput], int]:
        async with AsyncLLM(EngineConfig(model=str(folder), **KNOBS)) as llm:

            async def one(prompt: str, params: SamplingParams) -> RequestOutput:
                return [answer async for answer in llm.generate(prompt, params)][-1]

            return await asyncio.gather(*map(one, prompts, params)), llm.leaks

    return Answers(reference, llm.tokenizer, in_process, chat, *asyncio.run(serve()))


def greedy(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """Reference, without a cache."""
    torch.set_num_threads(1)  # More of them only wait for each other over so little work.
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        for _ in range(count):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(prompt) :].tolist()


def test_greedy_equals_transformers(answers: Answers) -> None:
    for text, answer in zip(PROMPTS, answers.in_process, strict=False):
        output = answer.outputs[0]
        assert answers.tokenizer.decode(answer.prompt_ids) == text
        assert output.token_ids == greedy(answers.reference, answer.prompt_ids, 24)
        assert output.text == answers.tokenizer.decode(output.token_ids)


def test_both_ways_give_the_same_answers(answers: Answers) -> None:
    assert answers.leaks == 0
    for answer, other in zip(answers.in_process, answers.served, strict=True):
        for mine, theirs in zip(answer.outputs, other.outputs, strict=True):
            assert mine.token_ids == theirs.token_ids
            assert mine.text == theirs.text
            assert [entry.logprob for entry in mine.logprobs or []] == pytest.approx(
                [entry.logprob for entry in theirs.logprobs or []], abs=1e-4
            )
    for answer in answers.in_process[len(PROMPTS) :]:
        assert answer.outputs[0].logprobs
        assert answer.outputs[0].token_ids != answer.outputs[1].token_ids


def test_chat(answers: Answers) -> None:
    assert answers.tokenizer.decode(answers.chat.prompt_ids, skip_special_tokens=False) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert answers.chat.outputs[0].token_ids == greedy(answers.reference, answers.chat.prompt_ids, 24)


async def test_missing_weights_stop_the_start_with_their_name(tmp_path: Path) -> None:
    """failure 67: over the process boundary."""
    make_tiny(tmp_path / "model", "llama", shards=3)
    (tmp_path / "model" / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(EngineDead, match="model-00002-of-00003"):
        await AsyncLLM(EngineConfig(model=str(tmp_path / "model"), **KNOBS)).start()
