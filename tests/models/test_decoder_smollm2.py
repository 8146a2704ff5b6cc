"""SmolLM2-135M from its GGUF file, in transformers with the same weights."""

import pytest
import torch
from decoder_steps import Steps, chunked, whole
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.checkpoint.checkpoint import open_checkpoint
from paceline.checkpoint.source import locate
from paceline.models.loader import load_decoder

TEXT = "The capital of France is Paris. A prime number has exactly two divisors, 1 and itself; 2, 3, 5, 7 and 11 are"
TOKENS = 12


@pytest.fixture(scope="module")
def smollm2():
    checkpoint = open_checkpoint(locate("smollm2"))
    model = LlamaForCausalLM(LlamaConfig(**checkpoint.config)).eval()
    weights = {name: checkpoint.tensor(name) for name in checkpoint.tensor_names()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    decoder = load_decoder(checkpoint, dtype=torch.float32, device="cpu")
    return model, decoder, torch.tensor(checkpoint.tokenizer().encode(TEXT))


def test_logits_equal_transformers(smollm2):
    model, decoder, ids = smollm2
    with torch.no_grad():
        expected = model(ids[None]).logits[0]
    assert (whole(decoder, ids) - expected).abs().max() < 1e-3
    assert (chunked(decoder, ids, 8) - expected).abs().max() < 1e-3


def test_greedy_tokens_equal_transformers(smollm2):
    model, decoder, ids = smollm2
    with torch.no_grad():
        expected = model.generate(ids[None], max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
    steps = Steps(decoder, [len(ids) + TOKENS], block_size=16)
    tokens, new = [], ids
    for _ in range(TOKENS):
        new = steps.step([new])[0][-1].argmax(-1, keepdim=True)
        tokens.append(int(new))
    assert tokens == expected[0, len(ids) :].tolist()
