"""Ranked choices, with figures worked out by hand."""

from dataclasses import replace
from typing import Any

import pytest

from lab.measured import SLO, invalid, point, results
from paceline.advisor.prices import Hardware, Prices
from paceline.advisor.recommend import NoAdvice, Recommendation, recommend
from paceline.lab.gpu_watch import Gpus
from paceline.lab.point import Point
from paceline.lab.search import SearchResult
from paceline.lab.slo import parse_constraints

PRICES = Prices("USD", {"H200": 3.6})
SLOW = (0.5, 3.0)


def sweep(engine: str, kept: list[float], broken: list[float], **more: Any) -> list[Point]:
    """A goodput of 90% of each rate that keeps `SLO`; 100 tokens a request."""
    points = [
        point(engine, rate=rate, requests_per_s=rate, tokens=100, goodput_rps=0.9 * rate, **more) for rate in kept
    ]
    return points + [
        point(engine, rate=rate, requests_per_s=rate, tokens=100, goodput_rps=0.5 * rate, ttft=SLOW, **more)
        for rate in broken
    ]


def lost(found: Recommendation) -> dict[str, str]:
    return {item.engine: item.lost for item in found.candidates}


def test_figures_of_one_engine() -> None:
    found = recommend([results(sweep("paceline", [1, 5, 10], [11]))], PRICES, target_load=30.0)
    (item,) = found.candidates
    assert found.choice is item
    assert found.constraints == SLO.split(", ")
    assert (item.highest_load, item.broken_load) == (10, 11)
    assert item.goodput_rps == 9
    assert item.tokens_per_request == 100
    assert item.replicas == 5  # 30 / (9 * 0.8) = 4.17
    assert item.gpus == 5
    assert item.cost_per_hour == pytest.approx(5 * 3.6)
    assert item.cost_per_million_tokens == pytest.approx(18 / (30 * 100 * 3600) * 1e6)
    assert item.cost_if_higher == pytest.approx(14.4 / (30 * 100 * 3600) * 1e6)  # 30 / (9.9 * 0.8) = 3.8


def test_without_a_load_the_cost_is_of_one_replica_at_its_headroom() -> None:
    found = recommend([results(sweep("paceline", [10], [11]))], PRICES, headroom=0.5)
    (item,) = found.candidates
    assert item.cost_per_million_tokens == pytest.approx(3.6 / (9 * 0.5 * 100 * 3600) * 1e6)
    assert item.cost_if_higher == pytest.approx(3.6 / (9.9 * 0.5 * 100 * 3600) * 1e6)
    assert item.replicas is item.gpus is item.cost_per_hour is None


def test_a_load_that_fits_exactly_needs_no_replica_more() -> None:
    found = recommend([results(sweep("paceline", [10], [11]))], PRICES, target_load=3 * 9 * 0.8)
    assert found.candidates[0].replicas == 3


def test_the_cheapest_wins_and_the_runner_up_broke_where_it_keeps() -> None:
    runs = [results(sweep("vllm", [1, 5], [10, 11]) + sweep("paceline", [1, 5, 10], [11]))]
    found = recommend(runs, PRICES, target_load=36.0)
    assert [item.engine for item in found.candidates] == ["paceline", "vllm"]
    assert lost(found)["paceline"] == ""
    assert lost(found)["vllm"] == (
        "It costs 2.00x what paceline costs and needs 10 GPUs instead of 5: at 10 requests/s, which paceline keeps, "
        "its TTFT p99 is 3 s, over the limit of 1 s."
    )


def test_limits_that_may_be_the_same_are_indistinguishable() -> None:
    runs = [results(sweep("vllm", [1, 5, 9], [11]) + sweep("paceline", [1, 5, 10], [11]))]
    found = recommend(runs, PRICES)
    assert found.choice is not None
    assert found.choice.engine == "paceline"
    assert lost(found)["vllm"].startswith("Indistinguishable from paceline by these loads: ")


def test_limits_that_touch_are_told_apart() -> None:
    runs = [results(sweep("vllm", [1, 9], [10]) + sweep("paceline", [1, 10], [11]))]
    assert lost(recommend(runs, PRICES))["vllm"].startswith("It costs 1.11x what paceline costs: at 10 requests/s")


def test_equal_limits_cost_the_same() -> None:
    runs = [results(sweep("vllm", [10], [11]) + sweep("paceline", [10], [11]))]
    sentence = "It costs as much as paceline and has as much room: 9 requests/s a replica."
    assert lost(recommend(runs, PRICES))["vllm"] == sentence


def test_a_load_that_takes_as_many_gpus_costs_the_same() -> None:
    runs = [results(sweep("vllm", [10], [11]) + sweep("paceline", [12], [13]))]
    found = recommend(runs, PRICES, target_load=5.0)
    sentence = "It costs as much as paceline, which has more room: 10.8 against 9 requests/s a replica."
    assert lost(found) == {"paceline": "", "vllm": sentence}
    assert lost(recommend(runs, PRICES))["vllm"].startswith("It costs 1.20x what paceline costs: ")


def test_a_limit_that_was_not_found_is_no_defeat() -> None:
    runs = [results(sweep("vllm", [5], []) + sweep("paceline", [10], [11]))]
    found = recommend(runs, PRICES)
    assert lost(found)["vllm"].startswith("Its limit is not known: it kept every valid load, up to 5 requests/s.")
    assert any("vllm: no valid load broke" in caution for caution in found.cautions)


def test_nor_is_it_one_where_the_costs_are_equal() -> None:
    runs = [results(sweep("vllm", [10], []) + sweep("paceline", [10], []))]
    assert lost(recommend(runs, PRICES))["vllm"] == (
        "Its limit is not known: it kept every valid load, up to 10 requests/s. By that it costs as much as paceline; "
        "measure higher loads."
    )


def test_prices_of_gpus_decide() -> None:
    prices = Prices("EUR", {"H200": 4.0, "L40S": 1.0})
    runs = [results(sweep("large", [10], [11]) + sweep("small", [4], [5]))]
    hardware = {"": Hardware("H200"), "small": Hardware("L40S")}
    found = recommend(runs, prices, hardware=hardware)
    assert found.choice is not None
    assert found.choice.engine == "small"
    assert lost(found)["large"] == (
        "It costs 1.60x what small costs: an hour of a replica (1 x H200) costs 4.00x as much, for 2.50x the goodput."
    )


def test_two_gpus_a_replica_cost_twice() -> None:
    runs = [results(sweep("paceline", [10], [11]))]
    found = recommend(runs, PRICES, target_load=20.0, hardware={"": Hardware("H200", 2)})
    item = found.candidates[0]
    assert (item.replicas, item.gpus, item.cost_per_hour) == (3, 6, pytest.approx(6 * 3.6))


def test_the_results_name_the_gpus() -> None:
    prices = Prices("EUR", {"H200": 4.0, "L40S": 1.0})
    runs = [results(sweep("large", [10], [11])).with_gpus("large", [Gpus("NVIDIA H200", 2, "570.1")])]
    assert recommend(runs, prices).candidates[0].hour_price == 8
    named = recommend(runs, prices, hardware={"": Hardware("L40S")})
    assert named.candidates[0].hour_price == 1


def test_engines_that_cannot_be_chosen_come_last_with_the_reason() -> None:
    points = [
        *sweep("slow", [], [1, 2]),
        *(invalid(item, "lateness: 30 ms late") for item in sweep("unmeasured", [1, 20], [])),
        point("bursty"),
        *sweep("unpriced", [30], [31]),
        *sweep("paceline", [1], [2]),
    ]
    found = recommend([results(points)], PRICES, hardware={"unpriced": Hardware("B300")})
    assert found.candidates[0].engine == "paceline"
    assert lost(found) == {
        "paceline": "",
        "slow": "It keeps ttft_p99 < 1s and tpot_p99 < 20ms at no load measured: at 1 requests/s TTFT p99 is 3 s, "
        "over the limit of 1 s.",
        "unmeasured": "None of its points is valid (lateness: 30 ms late).",
        "bursty": "It was not measured under request rates, so there is no load that it can promise.",
        "unpriced": "There is no price for the GPU it ran on, B300.",
    }
    assert "unmeasured: points left out because they are not valid: 2." in found.cautions


def test_no_engine_qualifies() -> None:
    found = recommend([results(sweep("slow", [], [1]))], PRICES)
    assert found.choice is None
    assert found.candidates[0].cost_per_million_tokens is None


def test_invalid_points_give_no_goodput() -> None:
    points = [*sweep("paceline", [1, 5], [6]), invalid(sweep("paceline", [5.5], [])[0], "loop: late")]
    assert recommend([results(points)], PRICES).candidates[0].highest_load == 5


def test_other_constraints_than_those_measured() -> None:
    found = recommend([results(sweep("paceline", [10], [11]))], PRICES, parse_constraints("ttft_p99 < 10s"))
    (item,) = found.candidates
    assert (item.highest_load, item.goodput_rps) == (11, 11)  # of completed requests
    assert any("measured for other constraints" in caution for caution in found.cautions)


def test_a_search_of_the_same_constraints_decides() -> None:
    points = [*sweep("paceline", [4, 5], [6]), *sweep("paceline", [], [5])]  # 5 was repeated, and broke once
    search = SearchResult(
        over="rate",
        target="paceline",
        constraints=["tpot_p99<20ms", "ttft_p99 < 1s"],
        attainment=0.99,
        load=5,
        verdict="kept",
        kept=5,
        broken=6,
        ended="edge",
        probes=[],
    )
    run = results(points)
    assert recommend([run], PRICES).candidates[0].highest_load == 4
    assert recommend([replace(run, searches=[search])], PRICES).candidates[0].highest_load == 5


def test_batches_where_there_are_no_rates() -> None:
    points = [point(batch=batch, requests_per_s=batch / 4, tokens=100, goodput_rps=batch / 4) for batch in (4, 8)]
    points.append(point(batch=16, requests_per_s=2.5, tokens=100, tpot=(0.02, 0.03)))
    found = recommend([results(points)], PRICES)
    (item,) = found.candidates
    assert found.load_unit == "requests at once"
    assert (item.highest_load, item.broken_load, item.goodput_rps) == (8, 16, 2)
    assert item.cost_per_million_tokens is not None
    assert item.cost_if_higher == pytest.approx(item.cost_per_million_tokens * 2 / 2.5)


def test_different_requests_are_not_comparable() -> None:
    other = [point("vllm", rate=5.0, tokens=500, requests_per_s=5)]
    found = recommend([results(sweep("paceline", [10], [11]) + other)], PRICES)
    assert any("different requests" in caution and "500" in caution for caution in found.cautions)


def test_engines_of_two_runs() -> None:
    runs = [results(sweep("paceline", [10], [11]), experiment="a"), results(sweep("vllm", [5], [6]), experiment="b")]
    assert [item.engine for item in recommend(runs, PRICES).candidates] == ["paceline", "vllm"]


def fixed(size: int) -> dict[str, Any]:
    return {"load": {"kind": "poisson", "workload": {"kind": "fixed", "input": size, "output": 100, "requests": 9}}}


def test_one_workload_at_a_time() -> None:
    runs = [results(sweep("paceline", [10], [11], **fixed(128)) + sweep("paceline", [3], [4], **fixed(2048)))]
    with pytest.raises(NoAdvice, match="'128x100' and '2048x100'"):
        recommend(runs, PRICES)
    assert recommend(runs, PRICES, workload="2048x100").candidates[0].highest_load == 3
    with pytest.raises(NoAdvice, match="no workload 'x'"):
        recommend(runs, PRICES, workload="x")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target_load": 0.0}, "load is 0.0"),
        ({"headroom": 1.0}, "headroom is 1.0"),
        ({"prices": Prices("USD", {"H200": 1.0, "L40S": 1.0})}, "paceline=1xH200"),
        ({"results": [results(sweep("paceline", [1], [2], slo=""), slo="")]}, "constraints to keep are not known"),
        ({"results": []}, "no engine"),
    ],
)
def test_what_is_missing_is_said(arguments: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"results": [results(sweep("paceline", [1], [2]))], "prices": PRICES}
    with pytest.raises(NoAdvice, match=message):
        recommend(**(given | arguments))
