"""The decoder against transformers, with the same weights."""

import pytest
import torch
from decoder_steps import Steps, chunked, whole

from paceline.checkpoint.checkpoint import open_checkpoint
from paceline.models.loader import load_decoder
from tiny_models import make_tiny

MODELS = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, one key head": ("llama", {"num_key_value_heads": 1}),
    "llama, no shared key heads": ("llama", {"num_key_value_heads": 4}),
    "llama, wide heads": ("llama", {"head_dim": 32}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, window": ("mistral", {"sliding_window": 8}),
    "qwen2": ("qwen2", {}),
    "qwen2, some layers slide": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3, biases": ("qwen3", {"attention_bias": True}),
    "qwen3, layer types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
    "llama3": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "yarn": (
        "qwen2",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    ),
}
LENGTH = 61


def build(folder, family, dtype=torch.float32, **options):
    model = make_tiny(folder, family, **options)
    return model, load_decoder(open_checkpoint(folder), dtype=dtype, device="cpu")


def prompt(length=LENGTH, seed=0):
    return torch.randint(4, 270, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(tmp_path, name, tied):
    family, options = MODELS[name]
    model, decoder = build(tmp_path, family, tied=tied, **options)
    with torch.no_grad():
        expected = model(prompt()[None]).logits[0]
    assert (whole(decoder, prompt()) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("size", [1, 2, 7, 16, 60])
@pytest.mark.parametrize("name", ["llama", "mistral, window", "qwen3, layer types"])
def test_logits_do_not_depend_on_the_chunk_size(tmp_path, name, size):
    """Failure 64: chunks of any size, tails of one token included."""
    family, options = MODELS[name]
    _, decoder = build(tmp_path, family, **options)
    assert (chunked(decoder, prompt(), size) - whole(decoder, prompt())).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["llama", "qwen2, some layers slide"])
def test_rows_that_prefill_and_decode_in_one_step(tmp_path, name):
    family, options = MODELS[name]
    _, decoder = build(tmp_path, family, **options)
    ids = [prompt(n, seed) for seed, n in enumerate((31, 44, 9, 26))]
    expected = [whole(decoder, row) for row in ids]
    steps = Steps(decoder, [len(row) for row in ids])
    # Tokens of each row in each step: prefill beside decode, a row that rests, rows that start late.
    plan = [(29, 7, 0, 0), (1, 1, 9, 20), (1, 35, 0, 1), (0, 1, 0, 5)]
    got = [[] for _ in ids]
    for counts in plan:
        chunks = [row[done : done + n] for row, done, n in zip(ids, steps.done, counts, strict=True)]
        for row, logits in enumerate(steps.step(chunks)):
            got[row].append(logits)
    for row, logits in enumerate(expected):
        assert (torch.cat(got[row]) - logits).abs().max() < 1e-4


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_bfloat16_is_as_close_to_float32_as_transformers(tmp_path, family):
    model, decoder = build(tmp_path, family, torch.bfloat16)
    with torch.no_grad():
        exact = model(prompt()[None]).logits[0]
        theirs = model.to(torch.bfloat16)(prompt()[None]).logits[0].float()
    ours = whole(decoder, prompt())
    assert ours.dtype == torch.float32
    assert (ours - exact).square().mean() < 1.5 * (theirs - exact).square().mean()


def test_float16_runs(tmp_path):
    model, decoder = build(tmp_path, "llama", torch.float16)
    with torch.no_grad():
        exact = model(prompt()[None]).logits[0]
    assert (whole(decoder, prompt()) - exact).abs().max() < 0.1


def test_padding_rows_write_to_the_sink_and_change_nothing(tmp_path):
    """Failure 76: rows that pad a step have slot 0, block 0; the last block in use keeps what it holds."""
    _, decoder = build(tmp_path, "llama")
    expected = whole(decoder, prompt())
    steps = Steps(decoder, [LENGTH, 1, 1])
    for table in steps.tables:
        table[1:] = 0  # two padding rows
    empty = torch.zeros(0, dtype=torch.int64)
    first = steps.step([prompt()[:-1], empty, empty])[0]
    steps.done = [LENGTH - 1, 0, 0]
    last, *padding = steps.step([prompt()[-1:], torch.tensor([9]), torch.tensor([9])])
    assert (torch.cat((first, last)) - expected).abs().max() < 1e-4
    assert all(logits.isfinite().all() for logits in padding)


def test_parameters_are_counted_once(tmp_path):
    model, decoder = build(tmp_path, "qwen3")
    assert sum(p.numel() for p in decoder.parameters()) == sum(p.numel() for p in model.parameters())
