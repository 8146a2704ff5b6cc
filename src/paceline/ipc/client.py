"""The client that starts the engine process."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import Callable

import msgspec
import zmq

from paceline.engine.config import EngineConfig
from paceline.ipc.kill import kill
from paceline.ipc.link import EngineLink
from paceline.ipc.messages import Failed, Join, Launch, Leave, Shutdown, client_address

log = logging.getLogger(__name__)

CLOSE_S = 5.0
"""Longest wait for the engine process to exit by itself."""
FAREWELL_MS = 1000
"""Longest time for a client to take the news of the engine's end."""
LAST_WORDS_S = 0.5
"""Longest wait for the reason of an engine that has just exited."""


class EngineClient(EngineLink):
    """One engine process, and the link to it.

    Args:
        config: of the engine.
        core: ``module:function`` that builds the core in the engine process.
        heartbeat_timeout, step_timeout: of `EngineLink`.
        on_progress: called with (stage, share) during start-up.

    Attributes:
        folder: of the link, private to this user. Set once spawned.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        core: str = "paceline.core:build_served_core",
        heartbeat_timeout: float = 5.0,
        step_timeout: float = 120.0,
        on_progress: Callable[[str, float], None] | None = None,
    ) -> None:
        super().__init__(0, heartbeat_timeout=heartbeat_timeout, step_timeout=step_timeout)
        self._config = config
        self._core = core
        self._on_progress = on_progress
        self._process: Process | None = None
        self._guests: set[int] = set()
        self._begun = False
        self._serving = False

    @property
    def pid(self) -> int | None:
        """Process id of the engine."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Starts the process and waits until it is ready. Raises EngineDead with the engine's reason if it fails, and
        RuntimeError when it was started or closed before."""
        await self.spawn()
        await self.ready()

    async def spawn(self) -> None:
        """The first half of `start`: the process runs, and its folder can be joined."""
        if self._begun or self._closing:
            raise RuntimeError("this client has been started or closed already")
        self._begun = True
        # Unix sockets have short names; a long TMPDIR would not fit.
        root = None if len(tempfile.gettempdir()) < 60 else "/tmp"
        self.folder = self._resources.enter_context(tempfile.TemporaryDirectory(prefix="paceline-", dir=root))
        launch = Launch(
            folder=self.folder,
            parent=os.getpid(),
            core=self._core,
            config=self._config,
            heartbeat_s=min(1.0, self._heartbeat_timeout / 5),
            log_level=logging.getLogger("paceline").getEffectiveLevel(),
        )
        self._connect(self.folder)
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "paceline.ipc.process",
                msgspec.json.encode(launch).decode(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            )
            for work in (self._read(), self._watch(), self._wait_for_exit()):
                self._spawn(work)
        except BaseException:
            await self.close()
            raise

    async def ready(self) -> None:
        """The second half of `start`."""
        try:
            self._take_over(await self._ready)
        except BaseException:
            await self.close()
            raise
        self._serving = True

    def admit(self, number: int) -> None:
        """Client ``number`` is about to join. If the engine process ends, it hears so: it cannot see that by itself."""
        self._guests.add(number)
        self._tell(Join(number))

    def dismiss(self, number: int) -> None:
        """Client ``number`` is gone: its requests end in the engine. Its number is not used again."""
        self._guests.remove(number)
        self._tell(Leave(number))

    def _die(self, reason: str) -> None:
        if self._connected and not self._dead.is_set():
            for number in self._guests:
                guest = self._outbox.context.socket(zmq.PUSH)
                guest.connect(client_address(self.folder, number))
                guest.send(self._encoder.encode(Failed(reason, "")))
                guest.close(linger=FAREWELL_MS)
        super()._die(reason)

    async def _close_engine(self) -> None:
        if self._process is not None and self._process.returncode is None:
            if self._serving:
                self._tell(Shutdown())
            else:
                kill(self._process)  # It reads no messages while it loads, and there is nothing to lose.
            try:
                await asyncio.wait_for(self._process.wait(), CLOSE_S)
            except TimeoutError:
                log.warning("the engine did not exit within %g s and is killed", CLOSE_S)
                kill(self._process)
                await self._process.wait()

    def _loading(self, stage: str, share: float) -> None:
        if self._on_progress is not None:
            self._on_progress(stage, share)

    async def _wait_for_exit(self) -> None:
        assert self._process is not None
        status = await self._process.wait()
        if status > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._dead.wait(), LAST_WORDS_S)
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        self._die(f"the engine process {how}")
