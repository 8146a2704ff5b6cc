"""What a search runs, without an engine."""

from dataclasses import replace
from pathlib import Path

import pytest

from lab.measured import point
from paceline.lab.experiment import Experiment, SearchPlan, StagePlan
from paceline.lab.point import Point
from paceline.lab.run import ExperimentRun
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
