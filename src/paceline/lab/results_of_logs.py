"""From raw event logs back to results: nothing else is needed."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from paceline.lab.client.log import StageLog, read_log
from paceline.lab.command_line import command_line
from paceline.lab.measure import measure
from paceline.lab.results import MeasuredTarget, Results
from paceline.lab.slo import Constraint
from paceline.lab.stage import WARM_UP


def log_files(paths: Iterable[Path]) -> list[Path]:
    """The files among ``paths``, and the logs in the folders among them."""
    return [file for path in paths for file in (sorted(path.glob("*.log")) if path.is_dir() else [path])]


def stage_logs(paths: Iterable[Path]) -> list[StageLog]:
    """Reads logs, and those in folders, in the order in which they ran; warm-ups are left out.

    Raises:
        InvalidLog: a file is no log.
        OSError: one cannot be read.
        ValueError: there are none.
    """
    logs = sorted((read_log(path) for path in log_files(paths)), key=lambda log: log.started_at)
    logs = [log for log in logs if log.stage.name != WARM_UP]
    if not logs:
        raise ValueError("no logs of stages were given")
    return logs


def results_of_logs(name: str, paths: Sequence[Path], constraints: Sequence[Constraint]) -> Results:
    """Measures the stages of these logs; raises as `stage_logs`."""
    logs = stage_logs(paths)
    targets = {log.target.name: MeasuredTarget.of(log.target) for log in logs}
    return Results(
        experiment=name,
        started_at=logs[0].started_at,
        targets=list(targets.values()),
        machine=logs[0].machine,
        commands=[*dict.fromkeys(log.command for log in logs), command_line()],
        constraints=[constraint.text for constraint in constraints],
        points=[measure(log, constraints) for log in logs],
        interrupted=any(log.interrupted for log in logs),
    )
