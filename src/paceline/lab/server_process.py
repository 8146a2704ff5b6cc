"""Starts and stops the engine that an experiment names by its command line."""

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from paceline.lab.target import Target

ANSWERS_S = 3.0
"""Patience with a server that is said to run already."""


class TargetFailed(RuntimeError):
    """An engine that did not start, or does not answer."""


@contextmanager
def running(target: Target, values: Mapping[str, object], log: Path) -> Iterator[None]:
    """While inside, the target answers; what was started here is stopped afterwards.

    Args:
        values: replace ``{name}`` in the command: ``--max-num-seqs {batch}``.
        log: gets what the server prints.

    Raises:
        TargetFailed: it ends or does not answer in time; the message has the end of its output.
    """
    if not target.command:
        wait_until_ready(target, None, log)
        yield
        return
    command = [part.format_map(values) for part in target.command]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **target.env},
            start_new_session=True,
        )
    try:
        wait_until_ready(target, process, log)
        yield
    finally:
        stop(process)


def wait_until_ready(target: Target, process: "subprocess.Popen[bytes] | None", log: Path) -> None:
    """Until ``/v1/models`` answers."""
    deadline = time.monotonic() + (target.ready_s if process else ANSWERS_S)
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    request = urllib.request.Request(f"{target.url}/v1/models", headers=headers)
    while True:
        try:
            with urllib.request.urlopen(request, timeout=5):
                return
        except urllib.error.HTTPError as error:
            why = f"answers {error.code}"
            if error.code < 500 and error.code != 404:
                raise TargetFailed(f"{target.name}: {target.url}/v1/models {why}") from error
        except OSError as error:
            why = str(error)
        if process is not None and process.poll() is not None:
            raise TargetFailed(f"{target.name}: ended with status {process.returncode} before it was ready{_end(log)}")
        if time.monotonic() > deadline:
            raise TargetFailed(f"{target.name}: {target.url}/v1/models does not answer ({why}){_end(log)}")
        time.sleep(0.2)


def stop(process: "subprocess.Popen[bytes]", grace_s: float = 30.0) -> None:
    """Ends a server and everything it started."""
    for number, patience in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
        break


def _end(log: Path, most: int = 1500) -> str:
    if not log.exists():
        return ""
    text = log.read_text(errors="replace").strip()[-most:]
    return f"; it printed:\n{text}" if text else ""
