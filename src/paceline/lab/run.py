"""Carries out an experiment: every target, every stage, every search."""

import math
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from paceline.lab.client.log import InvalidLog, read_log
from paceline.lab.client.machine import machine
from paceline.lab.client.run import LoadWorkerFailed, Progress, run_stage
from paceline.lab.command_line import command_line
from paceline.lab.experiment import Experiment, SearchPlan, StagePlan
from paceline.lab.gpu_watch import is_local, watching
from paceline.lab.measure import measure
from paceline.lab.point import Point
from paceline.lab.report.text import one_line
from paceline.lab.results import MeasuredTarget, Results
from paceline.lab.search import find_batch, find_rate
from paceline.lab.server_process import BUSY_S, Server, TargetFailed, running
from paceline.lab.slo import parse_constraints
from paceline.lab.stage import WARM_UP, Stage
from paceline.lab.statistics import PERCENTILES, requests_needed
from paceline.lab.target import Target
from paceline.lab.workload.invalid import InvalidWorkload
from paceline.lab.workload.spec import stage_from, workload_facts, workload_from

SLACK_S = 300.0
SLOWEST = 4.0
TOKEN_S, PROMPT_TOKEN_S = 0.1, 0.01
LONGEST_WORK_S = 3600.0

OnPoint = Callable[[Target, Point], None]
"""Called with every point as soon as it is measured."""
OnProgress = Callable[[Target, str, Progress], None]
"""Called while a stage runs, with its name."""


def make_stage(plan: StagePlan, run: int) -> Stage:
    """Draws the requests of a stage; another ``run`` gives other tokens of the same lengths.

    Raises:
        InvalidWorkload: the workload or the load names something that does not exist.
    """
    try:
        stage = stage_from(
            plan.name,
            workload_from(plan.workload, run),
            plan.load,
            deadline_s=plan.deadline_s or math.inf,
            ignore_eos=plan.ignore_eos,
            sampling=plan.sampling,
            workload=workload_facts(plan.workload),
        )
    except InvalidWorkload as error:
        raise InvalidWorkload(f"stage {plan.name}: {error}") from error
    # What a reader of the results must know of the replies, as of the load.
    stage = replace(stage, load={**stage.load, "ignore_eos": plan.ignore_eos})
    return stage if plan.deadline_s else replace(stage, deadline_s=deadline_of(stage))


def deadline_of(stage: Stage) -> float:
    """Seconds that only a stage takes which has come to a halt: five minutes more than four times its schedule. Where
    the engine decides how long it takes, also 0.1 s a token asked for and 10 ms a token of a prompt, at most 1 h."""
    at: dict[int, float] = {}
    for request in stage.requests:
        at[request.id] = request.due + (0.0 if request.after is None else at[request.after])
    work = 0.0
    if stage.offered_rate is None:
        work = sum(TOKEN_S * each.output_tokens + PROMPT_TOKEN_S * (each.prompt_tokens or 0) for each in stage.requests)
    return SLACK_S + SLOWEST * max(at.values()) + min(work, LONGEST_WORK_S)


class ExperimentRun:
    """One run of an experiment. What it has so far is in `results`, also while it runs and after an interruption.

    Attributes:
        results: see `lab.results`.
        logs: of the stages that have begun, in order.
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
            InvalidWorkload: a stage cannot be made.
            OSError: the folder cannot be made.
        """
        self.experiment = experiment
        self.logs: list[Path] = []
        self._constraints = parse_constraints(experiment.slo)
        self._stages = [make_stage(plan, run) for run, plan in enumerate(experiment.stages)]
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

    def warnings(self) -> list[str]:
        """Stages of which it is known before that their points will not be valid."""
        found = []
        for constraint in self._constraints:
            share = PERCENTILES.get(constraint.statistic)
            needed = 0 if share is None else requests_needed(share)
            few = [stage.name for stage in self._stages if len(stage.requests) < needed]
            if few:
                name = f"{constraint.metric}_{constraint.statistic}"
                found.append(f"{name} needs {needed} requests, which {', '.join(few)} will not have")
        return found

    def run(self) -> Results:
        """Measures everything. An engine that fails leaves the others to be measured; `Results.failures` says why.

        Raises:
            KeyboardInterrupt: `results` then has what was measured; the stage that was cut is not valid.
        """
        for target in self.experiment.targets:
            try:
                self._measure_target(target)
            except TargetFailed as error:
                self._fail(str(error))
            except (LoadWorkerFailed, OSError) as error:
                self._fail(f"{target.name}: {error}")
        self.results = replace(self.results, interrupted=False)
        return self.results

    def _fail(self, why: str) -> None:
        self.results = replace(self.results, failures=[*self.results.failures, why])

    def _measure_target(self, target: Target) -> None:
        search = self.experiment.search
        if any("{batch}" in part for part in target.command):
            for stage in self._stages:
                self._point_of_its_own(target, stage)
            if search is not None:
                self._search(target, search, partial(self._point_of_its_own, target))
            return
        with self._running(target, {}) as server:
            self._warm_up(server, self._stages[0])
            for stage in self._stages:
                self._point(server, stage)
            if search is not None:
                self._search(target, search, partial(self._point, server))

    def _point_of_its_own(self, target: Target, stage: Stage) -> Point:
        """With an engine whose own limit is the stage's batch."""
        with self._running(target, {"batch": stage.batch}) as server:
            self._warm_up(server, stage)
            return self._point(server, stage, batch_kind="engine")

    @contextmanager
    def _running(self, target: Target, values: Mapping[str, object]) -> Iterator[Server]:
        with running(target, values, self._folder / f"{_file_name(target.name)}.server.txt") as server:
            server.target = server.named_target()
            self.results = self.results.with_model(target.name, server.target.model)
            yield server

    def _warm_up(self, server: Server, stage: Stage) -> None:
        """A few requests whose times nobody wants.

        Raises:
            TargetFailed: not one of them was answered, so that there is nothing to measure.
        """
        requests = [replace(r, due=0.0, after=None) for r in stage.requests if not r.needs][: self.experiment.warmup]
        if not requests:
            return
        requests = [replace(request, id=id) for id, request in enumerate(requests)]
        warm = replace(stage, name=WARM_UP, requests=requests, load={"kind": "burst"}, offered_rate=None, batch=None)
        path = self._log_path(server.target, WARM_UP)
        run_stage(server.target, warm, path, workers=1)
        errors = [record.error for record in read_log(path).records]
        if all(error is not None for error in errors):
            why = one_line(str(errors[0]))
            raise TargetFailed(f"{server.target.name}: all requests before the first stage failed: {why}")

    def _point(self, server: Server, stage: Stage, batch_kind: str | None = None) -> Point:
        """
        Raises:
            TargetFailed: the engine answers no longer.
        """
        target, notify = server.target, self._on_progress
        server.wait(BUSY_S)
        path = self._log_path(target, stage.name)

        def progress(state: Progress) -> None:
            if notify is not None:
                notify(target, stage.name, state)

        def measured(gpu: dict[str, float] | None) -> Point:
            point = replace(measure(read_log(path), self._constraints), gpu=gpu)
            if batch_kind is not None:
                point = replace(point, batch_kind=batch_kind)
            self.results = replace(self.results, points=[*self.results.points, point])
            if self._on_point is not None:
                self._on_point(target, point)
            return point

        self.logs.append(path)
        try:
            with watching(is_local(target.url)) as watched:
                run_stage(target, stage, path, workers=self.experiment.workers, on_progress=progress)
        except KeyboardInterrupt:
            with suppress(InvalidLog, OSError):  # it may have been stopped before the first line
                measured(None)
            raise
        self.results = self.results.with_gpus(target.name, watched.gpus)
        return measured(watched.figures or None)

    def _search(self, target: Target, plan: SearchPlan, take: Callable[[Stage], Point]) -> None:
        """Repeats the experiment's first stage under other loads."""
        first, by_rate, number = self.experiment.stages[0], plan.over == "rate", len(self._stages)

        def at(load: float) -> Point:
            nonlocal number
            number += 1
            name = f"{plan.over}={load:g} #{number}"
            if by_rate:  # A repeat draws new arrivals.
                stage = replace(first, name=name, load={"kind": "poisson", "rate": load, "seed": 1000 + number})
            else:
                stage = _closed_loop(first, name, int(load))
            return take(make_stage(stage, 1000 + number))

        if by_rate:
            found = find_rate(at, low=plan.low, high=plan.high, attainment=plan.attainment, tolerance=plan.tolerance)
        else:
            found = find_batch(
                at, low=int(plan.low), high=int(plan.high), attainment=plan.attainment, tolerance=plan.tolerance
            )
        found = replace(found, target=target.name, constraints=self.results.constraints)
        self.results = replace(self.results, searches=[*self.results.searches, found])

    def _log_path(self, target: Target, stage: str) -> Path:
        return self._folder / f"{_file_name(target.name)}.{_file_name(stage)}.log"


def _closed_loop(plan: StagePlan, name: str, batch: int) -> StagePlan:
    """The plan's workload with so many requests at once, and at least four rounds of them where there can be more."""
    workload = dict(plan.workload)
    if workload.get("kind") in ("fixed", "lengths", "shared_prefix", "text"):
        workload["requests"] = max(workload["requests"], 4 * batch)
    return replace(plan, name=name, workload=workload, load={"kind": "concurrency", "batch": batch})


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_=.," else "-" for letter in name)
