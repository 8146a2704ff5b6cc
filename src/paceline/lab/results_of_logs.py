"""From raw event logs back to results: nothing else is needed."""

from collections.abc import Sequence
from pathlib import Path

from paceline.lab.client.log import read_log
from paceline.lab.command_line import command_line
from paceline.lab.measure import measure
from paceline.lab.results import MeasuredTarget, Results
from paceline.lab.slo import Constraint


def results_of_logs(name: str, paths: Sequence[Path], constraints: Sequence[Constraint]) -> Results:
    """Measures the stages of these logs, in the order in which they ran; warm-ups are left out.

    Raises:
        InvalidLog: a file is no log.
        ValueError: there are none.
    """
    logs = sorted((read_log(path) for path in paths), key=lambda log: log.started_at)
    logs = [log for log in logs if log.stage.name != "warm-up"]
    if not logs:
        raise ValueError("no logs of stages were given")
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
