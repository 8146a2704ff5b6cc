"""Measures an engine in this process, over the same stages and by the same definitions as over HTTP."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version

from paceline.engine.config import EngineConfig
from paceline.lab.client.log import StageLog
from paceline.lab.client.machine import machine
from paceline.lab.command_line import command_line
from paceline.lab.experiment import StagePlan
from paceline.lab.gpu_watch import watching
from paceline.lab.in_process import serve_stage
from paceline.lab.measure import measure
from paceline.lab.results import MeasuredTarget, Results
from paceline.lab.run import make_stage
from paceline.lab.slo import Constraint
from paceline.lab.stage import Stage
from paceline.lab.target import Target
from paceline.llm import LLM

WARMUP = 4
"""Requests before the first stage."""

OnProgress = Callable[[Stage, int], None]
"""Called with the stage that runs and how many of its requests have ended."""


def bench_engine(
    config: EngineConfig,
    plans: Sequence[StagePlan],
    constraints: Sequence[Constraint],
    on_progress: OnProgress | None = None,
) -> Iterator[Results]:
    """Loads the engine once and carries out every stage; gives what is measured so far after each.

    Raises:
        CheckpointError, InvalidConfig: the engine cannot be made.
        InvalidWorkload: a stage cannot.
    """
    stages = [make_stage(plan, run) for run, plan in enumerate(plans)]
    target = Target(name="in process", url="", model=config.model)
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    command = command_line()
    knobs = {key: value for key, value in asdict(config).items() if key != "model"}
    results = Results(
        experiment="engine",
        started_at=started_at,
        targets=[MeasuredTarget.of(target, {"paceline": version("paceline"), "knobs": knobs})],
        machine=machine(),
        commands=[command],
        constraints=[constraint.text for constraint in constraints],
    )
    with LLM(config.model, **knobs) as llm:
        first = [replace(request, due=0.0, after=None, id=id) for id, request in enumerate(stages[0].requests[:WARMUP])]
        serve_stage(llm, replace(stages[0], requests=first))
        for stage in stages:
            with watching(here=True) as watched:
                records = serve_stage(llm, stage, None if on_progress is None else partial(on_progress, stage))
            results = results.with_gpus(target.name, watched.gpus)
            log = StageLog(
                stage=stage,
                target=target,
                started_at=started_at,
                records=records,
                client={},
                interrupted=False,
                machine={},
                command=command,
            )
            point = replace(measure(log, constraints), gpu=watched.figures or None)
            points = [*results.points, point]
            results = replace(results, points=points, interrupted=len(points) < len(stages))
            yield results
