"""SmolLM2 from its GGUF file against transformers with the same weights, in float32."""

import pytest
import torch
from driver import BLOCK_SIZE, Driver
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.checkpoint.checkpoint import open_checkpoint
from paceline.checkpoint.source import locate
from paceline.engine.config import EngineConfig
from paceline.runner.cpu import CPURunner

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea,",
    "1, 1, 2, 3, 5, 8,",
    "Water boils at a temperature of",
    "<|im_start|>user\nWrite a haiku about autumn.<|im_end|>\n<|im_start|>assistant\n",
    "Die Hauptstadt von Deutschland ist",
    "A list of prime numbers below 100: 2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67,",
]
OUTPUT = 64


@pytest.mark.timeout(300)
def test_greedy_tokens_and_logprobs_equal_transformers():
    """All prompts in one batch. Each token must be transformers' first choice after the tokens before it, which is
    greedy decoding step by step, computed in one pass."""
    checkpoint = open_checkpoint(locate("smollm2"))
    encode = checkpoint.tokenizer().encode
    prompts = [encode(prompt) for prompt in PROMPTS]
    config = EngineConfig(
        model="smollm2", dtype="float32", max_num_seqs=len(PROMPTS), block_size=BLOCK_SIZE, max_model_len=160
    )
    runner = CPURunner(config, checkpoint)
    driver = Driver(runner)
    added = [driver.start(row, prompt, logprobs=0) for row, prompt in enumerate(prompts)]
    driver.step(added=added, advance={row: len(prompt) for row, prompt in enumerate(prompts)})
    for _ in range(OUTPUT - 1):
        driver.step()
    runner.close()

    model = LlamaForCausalLM(LlamaConfig(**checkpoint.config)).eval()
    weights = {name: checkpoint.tensor(name).float() for name in checkpoint.tensor_names()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    model.tie_weights()
    for row, prompt in enumerate(prompts):
        tokens = driver.tokens[row]
        with torch.inference_mode():
            logits = model(torch.tensor([tokens[:-1]])).logits[0, len(prompt) - 1 :]
        assert tokens[len(prompt) :] == logits.argmax(-1).tolist(), PROMPTS[row]
        expected = logits.log_softmax(-1).amax(-1).tolist()
        assert [entry.logprob for entry in driver.logprobs[row]] == pytest.approx(expected, abs=1e-3)
