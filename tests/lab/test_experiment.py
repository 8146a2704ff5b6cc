"""Stages that repeat, and what a search makes of a stage."""

import pytest

from paceline.lab.experiment import InvalidExperiment, SearchPlan, numbered, rate_stages
from paceline.lab.run import make_stage
from paceline.lab.target import server_url
from paceline.lab.workload.invalid import InvalidWorkload


def test_a_stage_that_comes_again_is_a_repeat_with_other_arrivals() -> None:
    found = numbered(rate_stages([3, 5, 3, 3], 8, 4, 20))
    assert [stage.name for stage in found] == ["rate=3", "rate=5", "rate=3 #2", "rate=3 #3"]
    dues = [[request.due for request in make_stage(stage, 0).requests] for stage in found]
    assert len({tuple(due) for due in dues}) == 4


def test_what_cannot_be_made_names_its_stage() -> None:
    with pytest.raises(InvalidWorkload, match="stage rate=3: requests: must be a whole number"):
        make_stage(rate_stages([3], 8, 4, 0)[0], 0)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"low": 0}, "range of loads"),
        ({"high": float("nan")}, "range of loads"),
        ({"over": "batch", "low": 1.5}, "whole number"),
        ({"attainment": 1.1}, "attainment"),
        ({"tolerance": 0}, "tolerance"),
    ],
)
def test_a_search_that_makes_no_sense(more: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidExperiment, match=message):
        SearchPlan(**({"over": "rate", "low": 1, "high": 9} | more))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://a:1", "http://a:1"),
        ("https://a/v1", "https://a"),
        ("http://[::1]:80/llm/v1/", "http://[::1]:80/llm"),
    ],
)
def test_urls(text: str, url: str) -> None:
    assert server_url(text) == url


@pytest.mark.parametrize("text", ["", "a", "a:1", "ftp://a", "http://", "http://:80", "http://a:x", "http://a:70000"])
def test_what_is_no_url(text: str) -> None:
    with pytest.raises(ValueError, match="is not like"):
        server_url(text)
