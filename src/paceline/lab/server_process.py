"""Starts and stops the engine that an experiment names by its command line."""

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.lab.target import Target

ANSWERS_S = 3.0
"""Patience with a server that is said to run already."""
BUSY_S = 30.0
"""Patience with one that was measured a moment ago."""

# As the load client: straight to the server, whatever proxy the environment names.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class TargetFailed(RuntimeError):
    """An engine that did not start, or does not answer."""


@dataclass
class Server:
    """An engine that answered."""

    target: Target
    process: "subprocess.Popen[bytes] | None"
    """Where it was started here."""
    log: Path
    """What it prints, where it was started here."""
    models: list[str] = field(default_factory=list)
    """That it says it serves; filled by `wait`."""

    def wait(self, patience_s: float) -> None:
        """Until ``/v1/models`` answers.

        Raises:
            TargetFailed: it ends or does not answer in time; the message has the end of its output.
        """
        target, deadline = self.target, time.monotonic() + patience_s
        headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
        request = urllib.request.Request(f"{target.url}/v1/models", headers=headers)
        while True:
            self.check()
            try:
                with _opener.open(request, timeout=5) as response:
                    self.models = _models(response.read())
                    return
            except urllib.error.HTTPError as error:
                why = f"it answers {error.code}"
                if error.code < 500 and error.code != 404:
                    raise TargetFailed(f"{target.name}: {target.url}/v1/models: {why}") from error
            except OSError as error:
                reason = getattr(error, "reason", error)
                why = getattr(reason, "strerror", None) or str(reason)
            if time.monotonic() > deadline:
                raise TargetFailed(f"{target.name}: {target.url}/v1/models does not answer: {why}{self._end()}")
            time.sleep(0.2)

    def check(self) -> None:
        """
        Raises:
            TargetFailed: it was started here and has ended.
        """
        if self.process is not None and (status := self.process.poll()) is not None:
            raise TargetFailed(f"{self.target.name}: ended by itself with status {status}{self._end()}")

    def named_target(self) -> Target:
        """The target with the name of its model.

        Raises:
            TargetFailed: none was given, and the server does not have exactly one.
        """
        if self.target.model:
            return self.target
        if len(self.models) != 1:
            found = f"has several models, {', '.join(self.models)}" if self.models else "does not say what it serves"
            raise TargetFailed(f"{self.target.name}: no model is named, and the server {found}")
        return replace(self.target, model=self.models[0])

    def _end(self, most: int = 1500) -> str:
        if self.process is None or not self.log.exists():
            return ""
        text = self.log.read_text(errors="replace").strip()[-most:]
        return f"; it printed:\n{text}" if text else ""


@contextmanager
def running(target: Target, values: Mapping[str, object], log: Path) -> Iterator[Server]:
    """While inside, the target answers; what was started here is stopped afterwards.

    Args:
        values: replace ``{name}`` in the command: ``--max-num-seqs {batch}``.
        log: gets what the server prints.

    Raises:
        TargetFailed: its command cannot be run, it ended by itself, or as `Server.wait`.
    """
    if not target.command:
        server = Server(target, None, log)
        server.wait(ANSWERS_S)
        yield server
        return
    command = [_filled(part, values) for part in target.command]
    try:
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **target.env},
                start_new_session=True,
            )
    except OSError as error:
        raise TargetFailed(f"{target.name}: cannot run {command[0]}: {error.strerror}") from error
    try:
        server = Server(target, process, log)
        server.wait(target.ready_s)
        yield server
        server.check()
    finally:
        stop(process)


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


def _filled(part: str, values: Mapping[str, object]) -> str:
    """Other braces stay: a command may have JSON in it."""
    for name, value in values.items():
        part = part.replace(f"{{{name}}}", str(value))
    return part


def _models(body: bytes) -> list[str]:
    """Of a list of models as OpenAI's API gives it; of anything else none."""
    try:
        return [str(model["id"]) for model in json.loads(body)["data"]]
    except (ValueError, KeyError, TypeError):
        return []
