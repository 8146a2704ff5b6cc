"""What a search runs, without an engine."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab.measured import point
from paceline.lab.experiment import Experiment, SearchPlan, StagePlan
from paceline.lab.point import Point
from paceline.lab.run import ExperimentRun, make_stage
from paceline.lab.stage import Stage
from paceline.lab.target import Target

TARGET = Target("engine", "http://127.0.0.1:1", "m")
PLAN = StagePlan(
    "first",
    {"kind": "fixed", "input": 3, "output": 2, "requests": 6, "seed": 5},
    {"kind": "burst"},
    deadline_s=77.0,
    ignore_eos=False,
    sampling={"temperature": 1.0},
)


def test_points_that_cannot_be_valid_are_known_before(tmp_path: Path) -> None:
    stages = [replace(PLAN, name=f"n={n}", workload={**PLAN.workload, "requests": n}) for n in (20, 58, 59)]
    experiment = Experiment(name="e", targets=[TARGET], stages=stages, slo="ttft_p95 < 1s, tpot_mean < 1s")
    assert ExperimentRun(experiment, tmp_path).warnings() == [
        "ttft_p95 needs 59 requests, which n=20, n=58 will not have"
    ]


@pytest.mark.parametrize(
    ("workload", "load", "seconds"),
    [
        ({}, {"kind": "constant", "rate": 2.0}, 300 + 4 * 2.5),
        ({}, {"kind": "burst"}, 300 + 6 * (2 * 0.1 + 3 * 0.01)),
        ({"requests": 4096, "output": 2048}, {"kind": "burst"}, 300 + 3600),
        ({}, {"kind": "concurrency", "batch": 2}, 300 + 6 * (2 * 0.1 + 3 * 0.01)),
        (
            {"kind": "multi_turn", "sessions": 1, "turns": 3, "think_s": 50, "think_cv": 0, "requests": None},
            {"kind": "burst"},
            300 + 4 * 100 + 3 * 2 * 0.1,
        ),
    ],
)
def test_an_engine_that_hangs_ends_its_stage(workload: dict[str, Any], load: dict[str, Any], seconds: float) -> None:
    asked = {key: value for key, value in (PLAN.workload | workload).items() if value is not None}
    plan = replace(PLAN, workload=asked, load=load, deadline_s=None)
    assert make_stage(plan, 0).deadline_s == pytest.approx(seconds, abs=0.01)
    assert make_stage(replace(plan, deadline_s=777.0), 0).deadline_s == 777.0


@pytest.mark.parametrize("over", ["rate", "batch"])
def test_a_search_repeats_the_first_stage_under_other_loads(over: str, tmp_path: Path) -> None:
    search = SearchPlan(over, 1, 8)
    run = ExperimentRun(
        Experiment(name="e", targets=[TARGET], stages=[PLAN], slo="ttft_p99 < 1s", search=search), tmp_path
    )
    seen: list[Stage] = []

    def take(stage: Stage) -> Point:
        seen.append(stage)
        return point(rate=stage.offered_rate, batch=stage.batch, name=stage.name)

    run._search(TARGET, search, take)
    assert run.results.searches[0].load == 8
    assert {(stage.deadline_s, stage.ignore_eos, stage.sampling["temperature"]) for stage in seen} == {
        (77.0, False, 1.0)
    }
    assert len({stage.name for stage in seen} | {"first"}) == len(seen) + 1
    prompts = [tuple(map(str, (request.prompt for request in stage.requests))) for stage in seen]
    assert len(set(prompts)) == len(seen)  # no cache answers from the stage before
    for stage in seen:
        assert stage.offered_rate is not None or stage.batch is not None
        # A closed loop needs rounds; the requests of a rate are those that were asked for.
        assert len(stage.requests) == max(6, 4 * (stage.batch or 0))
