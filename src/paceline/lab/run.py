"""Carries out an experiment: every target, every stage, every search."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from paceline.lab.client.log import read_log
from paceline.lab.client.machine import machine
from paceline.lab.client.run import Progress, run_stage
from paceline.lab.command_line import command_line
from paceline.lab.experiment import Experiment, SearchPlan, StagePlan, batch_stages, rate_stages
from paceline.lab.gpu_watch import is_local, watching
from paceline.lab.measure import measure
from paceline.lab.point import Point
from paceline.lab.results import MeasuredTarget, Results
from paceline.lab.search import SearchResult, find_batch, find_rate
from paceline.lab.server_process import running
from paceline.lab.slo import parse_constraints
from paceline.lab.stage import WARM_UP, Stage
from paceline.lab.target import Target
from paceline.lab.workload.spec import stage_from, workload_facts, workload_from

OnPoint = Callable[[Target, Point], None]
"""Called with every point as soon as it is measured."""
OnProgress = Callable[[Target, str, Progress], None]
"""Called while a stage runs, with its name."""


def make_stage(plan: StagePlan, run: int) -> Stage:
    """Draws the requests of a stage; another ``run`` gives other tokens of the same lengths.

    Raises:
        InvalidWorkload: the workload or the load names something that does not exist.
    """
    return stage_from(
        plan.name,
        workload_from(plan.workload, run),
        plan.load,
        deadline_s=plan.deadline_s,
        ignore_eos=plan.ignore_eos,
        sampling=plan.sampling,
        workload=workload_facts(plan.workload),
    )


class ExperimentRun:
    """One run of an experiment. What it has so far is in `results`, also while it runs and after an interruption.

    Attributes:
        results: see `lab.results`.
        logs: of the stages that have ended, in order.
    """

    def __init__(
        self,
        experiment: Experiment,
        folder: Path,
        *,
        on_point: OnPoint | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        """
        Args:
            folder: gets the logs of all stages and what servers print; made if it does not exist.

        Raises:
            InvalidConstraint: the experiment's ``slo`` is none.
        """
        self.experiment = experiment
        self.logs: list[Path] = []
        self._constraints = parse_constraints(experiment.slo) if experiment.slo else []
        self._folder = folder
        self._on_point, self._on_progress = on_point, on_progress
        folder.mkdir(parents=True, exist_ok=True)
        starts = [shlex.join(target.command) for target in experiment.targets if target.command]
        self.results = Results(
            experiment=experiment.name,
            started_at=datetime.now(UTC).isoformat(timespec="seconds"),
            targets=[MeasuredTarget.of(target) for target in experiment.targets],
            machine=machine(),
            commands=[command_line(), *starts],
            constraints=[constraint.text for constraint in self._constraints],
            interrupted=True,
        )

    def run(self) -> Results:
        """Measures everything.

        Raises:
            InvalidWorkload: before anything is started.
            TargetFailed: an engine did not start.
            KeyboardInterrupt: `results` then has what was measured before, and the stage that was cut is in `logs`.
        """
        stages = [make_stage(plan, run) for run, plan in enumerate(self.experiment.stages)]
        for target in self.experiment.targets:
            self._measure_target(target, stages)
        self.results = replace(self.results, interrupted=False)
        return self.results

    def _measure_target(self, target: Target, stages: Sequence[Stage]) -> None:
        output = self._folder / f"{_file_name(target.name)}.server.txt"
        if any("{batch}" in part for part in target.command):
            for stage in stages:
                with running(target, {"batch": stage.batch}, output):
                    self._warm_up(target, stage)
                    self._take(target, replace(self._point(target, stage), batch_kind="engine"))
            return
        with running(target, {}, output):
            self._warm_up(target, stages[0])
            for stage in stages:
                self._take(target, self._point(target, stage))
            if self.experiment.search is not None:
                found = self._search(target, self.experiment.search)
                self.results = replace(self.results, searches=[*self.results.searches, found])

    def _warm_up(self, target: Target, stage: Stage) -> None:
        """A few requests whose times nobody wants."""
        requests = [replace(r, due=0.0, after=None) for r in stage.requests if not r.needs][: self.experiment.warmup]
        if requests:
            requests = [replace(request, id=id) for id, request in enumerate(requests)]
            warm = replace(
                stage, name=WARM_UP, requests=requests, load={"kind": "burst"}, offered_rate=None, batch=None
            )
            run_stage(target, warm, self._log_path(target, WARM_UP), workers=1)

    def _point(self, target: Target, stage: Stage) -> Point:
        path = self._log_path(target, stage.name)
        notify = self._on_progress

        def progress(state: Progress) -> None:
            if notify is not None:
                notify(target, stage.name, state)

        self.logs.append(path)
        with watching(is_local(target.url)) as watched:
            run_stage(target, stage, path, workers=self.experiment.workers, on_progress=progress)
        self.results = self.results.with_gpus(target.name, watched.gpus)
        return replace(measure(read_log(path), self._constraints), gpu=watched.figures or None)

    def _take(self, target: Target, point: Point) -> None:
        self.results = replace(self.results, points=[*self.results.points, point])
        if self._on_point is not None:
            self._on_point(target, point)

    def _search(self, target: Target, plan: SearchPlan) -> SearchResult:
        """Uses the workload of the experiment's first stage."""
        workload = self.experiment.stages[0].workload
        count, runs, by_rate = int(workload.get("requests", 0)), 1000, plan.over == "rate"

        def at(load: float) -> Point:
            nonlocal runs
            runs += 1
            found = (rate_stages([load], 1, 1, count) if by_rate else batch_stages([int(load)], 1, 1, count))[0]
            name = f"{found.name} #{runs - 1000}"
            load_ = found.load | ({"seed": runs} if by_rate else {})  # a repeat draws new arrivals
            point = self._point(target, make_stage(replace(found, name=name, workload=workload, load=load_), runs))
            self._take(target, point)
            return point

        if by_rate:
            found = find_rate(at, low=plan.low, high=plan.high, attainment=plan.attainment, tolerance=plan.tolerance)
        else:
            found = find_batch(
                at, low=int(plan.low), high=int(plan.high), attainment=plan.attainment, tolerance=plan.tolerance
            )
        return replace(found, target=target.name, constraints=self.results.constraints)

    def _log_path(self, target: Target, stage: str) -> Path:
        return self._folder / f"{_file_name(target.name)}.{_file_name(stage)}.log"


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_=.," else "-" for letter in name)
