from typing import Any

import pytest

from paceline.checkpoint.error import CheckpointError
from paceline.checkpoint.generation import generation_defaults
from paceline.engine.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer_eos", "eos_ids"),
    [
        ({"eos_token_id": 5}, {"eos_token_id": 6}, 7, (5,)),
        ({"eos_token_id": [5, 6, 5]}, {}, 7, (5, 6)),
        ({"eos_token_id": 0}, {"eos_token_id": 6}, 7, (0,)),
        ({"eos_token_id": None}, {"eos_token_id": [8, 9]}, 7, (8, 9)),
        ({"eos_token_id": []}, {}, 7, (7,)),
        ({}, {}, 7, (7,)),
        ({}, {}, None, ()),
    ],
)
def test_eos_ids(
    generation: dict[str, Any], config: dict[str, Any], tokenizer_eos: int | None, eos_ids: tuple[int, ...]
) -> None:
    assert generation_defaults(generation, config, tokenizer_eos).eos_ids == eos_ids


@pytest.mark.parametrize("top_k", [0, -1])
def test_top_k_zero_is_off(top_k: int) -> None:
    """failure 25 (defaults half): Hugging Face's 0 means off, and must not be refused."""
    defaults = generation_defaults({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": top_k}, {}, None)
    assert defaults.sampling == {"temperature": 0.6, "top_p": 0.9, "top_k": 0}
    assert not SamplingParams(**defaults.sampling).greedy


def test_only_what_is_stated() -> None:
    stated = {"temperature": None, "min_p": 0.05, "repetition_penalty": 1.1, "max_length": 20, "num_beams": 4}
    assert generation_defaults(stated, {}, None).sampling == {"min_p": 0.05, "repetition_penalty": 1.1}
    assert generation_defaults({}, {}, None).sampling == {}


def test_do_sample_false_is_greedy() -> None:
    stated = {"do_sample": False, "temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.05}
    assert generation_defaults(stated, {}, None).sampling == {"temperature": 0.0, "repetition_penalty": 1.05}


@pytest.mark.parametrize("stated", [{"top_p": 1.5}, {"temperature": "hot"}, {"top_k": 2.5}, {"eos_token_id": "</s>"}])
def test_unusable_values(stated: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=next(iter(stated))):
        generation_defaults(stated, {}, None)
