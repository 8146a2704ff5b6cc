"""What travels between the client and the engine process, as MessagePack. Decoding checks every field's type and
builds nothing but these classes."""

import msgspec

from paceline.engine.config import EngineConfig
from paceline.engine.limits import Limits
from paceline.engine.request import CoreOutput, CoreStats, Request


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The engine process's only argument, as JSON. What code runs is decided here, never by a message."""

    folder: str
    """Private folder (mode 0700) of the two sockets."""
    parent: int
    """Process id of the client; the engine ends when it is gone."""
    core: str
    """``module:function``, called as ``function(config, progress) -> EngineCore``."""
    config: EngineConfig
    heartbeat_s: float
    log_level: int

    @property
    def to_engine(self) -> str:
        return f"ipc://{self.folder}/engine"

    @property
    def to_client(self) -> str:
        return f"ipc://{self.folder}/client"


# Client to engine.


class Add(msgspec.Struct, tag=True):
    request: Request


class Abort(msgspec.Struct, tag=True):
    """Ends a request, or one candidate of it. For one that has ended already it does nothing."""

    request: int
    candidate: int | None = None


class Shutdown(msgspec.Struct, tag=True):
    """Close the core and exit."""


ToEngine = Add | Abort | Shutdown


# Engine to client.


class Loading(msgspec.Struct, tag=True):
    """How far start-up is."""

    stage: str
    share: float
    """Of this stage, 0 to 1."""


class Ready(msgspec.Struct, tag=True):
    limits: Limits
    stats: CoreStats


class Outputs(msgspec.Struct, tag=True):
    """All that one step brought."""

    outputs: list[CoreOutput]
    stats: CoreStats


class Beat(msgspec.Struct, tag=True):
    """Sign of life, from a thread beside the loop."""

    steps: int
    """Steps completed."""
    step_age: float
    """Seconds since the step under way began; 0 between steps."""
    leaks: int
    """Idle checks that failed since the start."""


class Failed(msgspec.Struct, tag=True):
    """The engine's last words."""

    reason: str
    traceback: str
    """Empty for what the user can correct: a checkpoint or a knob."""


ToClient = Loading | Ready | Outputs | Beat | Failed
