from dataclasses import fields
from typing import Any

import msgspec
import numpy as np
import pytest

from paceline.engine.invalid import InvalidRequest
from paceline.engine.limits import Limits
from paceline.engine.sampling_params import SamplingParams

WRONG: dict[str, tuple[Any, ...]] = {
    "n": ("1", 1.0, True, None, 0, 10**5000),
    "temperature": ("1", True, None, float("nan"), float("inf"), -0.1, 10**400, -(10**5000)),
    "top_p": ("1", True, None, 1.1),
    "top_k": (1.0, True, None, -1, 2**31, 10**30),
    "min_p": ("0", False, None, -0.1),
    "presence_penalty": ("0", False, None, 2.1),
    "frequency_penalty": ("0", False, None, -2.1),
    "repetition_penalty": ("1", True, None, 0.0),
    "logit_bias": (5, "1", [1], {1.0: 1.0}, {"1": 1.0}, {1: "1"}, {1: None}, {True: 1.0}, {2**31: 1.0}, {1: 101}),
    "allowed_token_ids": (5, "5", {5}, [1.0], ["1"], [True], [-1], [2**31], [None]),
    "seed": ("1", 1.0, True, 2**63, -(2**63) - 1),
    "stop": (5, b"x", [""], "", [5], [None], {"x": 1}, ["x"] * 65, "\ud800", ["a", "\udc00"]),
    "stop_token_ids": (5, "5", {5}, [1.0], ["1"], [True], [-1], [2**31], [None]),
    "include_stop_str_in_output": (0, 1, "no", None),
    "ignore_eos": (0, 1, "no", None),
    "min_tokens": (1.0, True, None, -1, 2**31, 2**64),
    "max_tokens": ("1", 1.0, True, -1, 2**31, 2**64),
    "logprobs": ("1", 1.0, True, -1, 21),
    "prompt_logprobs": ("1", 1.0, True, -1, 21),
    "skip_special_tokens": (0, 1, "no", None),
}


def test_every_field_is_covered() -> None:
    assert list(WRONG) == [field.name for field in fields(SamplingParams)]


@pytest.mark.parametrize("field", WRONG)
def test_a_wrong_value_names_its_field(field: str) -> None:
    for value in WRONG[field]:
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(**{field: value})
        assert caught.value.field == field
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "given",
    [
        {"stop": "THE END", "temperature": 1, "top_p": np.float64(0.5)},
        {"stop": ["THE END"], "stop_token_ids": [1, 2], "allowed_token_ids": [3], "logit_bias": {1: 2}},
        {"top_k": 2**31 - 1, "max_tokens": 2**31 - 1, "min_tokens": 2**31 - 1, "seed": -(2**63)},
        {"logit_bias": {2**31 - 1: np.float64(1.5)}, "stop_token_ids": [2**31 - 1]},
        {"max_tokens": None, "seed": None, "logprobs": None},
    ],
)
def test_what_is_accepted_travels(given: dict[str, Any]) -> None:
    params = SamplingParams(**given)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_other_forms_of_the_same() -> None:
    one: Any = "THE END"
    assert SamplingParams(stop=one) == SamplingParams(stop=("THE END",))
    given: dict[str, Any] = {"stop": ["a", "b"], "stop_token_ids": [1], "allowed_token_ids": [2]}
    params = SamplingParams(**given)
    assert (params.stop, params.stop_token_ids, params.allowed_token_ids) == (("a", "b"), (1,), (2,))
    nothing: dict[str, Any] = dict.fromkeys(("stop", "stop_token_ids", "allowed_token_ids", "logit_bias"))
    assert SamplingParams(**nothing) == SamplingParams()


def test_the_callers_dict_is_copied() -> None:
    bias = {1: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[2] = 1000.0
    assert params.logit_bias == {1: 1.0}


@pytest.mark.parametrize("prompt", [5, None, "12", b"12", {1: 2}, np.array([1, 2]), [10**5000], []])
def test_limits_take_any_prompt(prompt: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^prompt: "):
        Limits(10, 20).check(prompt, SamplingParams())


@pytest.mark.parametrize("params", [None, 5, {"temperature": 0}, "greedy"])
def test_limits_take_any_params(params: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^sampling_params: "):
        Limits(10, 20).check([1], params)
