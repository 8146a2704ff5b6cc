"""What travels between the clients and the engine process, as MessagePack. Decoding checks every field's type and
builds nothing but these classes.

Clients have numbers, which are never used again. Number 0 started the engine; others join it. The number is part of the
ids of a client's requests, so that the engine knows whom an output is for.
"""

from collections.abc import Iterator

import msgspec

from paceline.engine.config import EngineConfig
from paceline.engine.limits import Limits
from paceline.engine.request import CoreOutput, CoreStats, Request

CLIENT_SHIFT = 40
"""``request.id >> CLIENT_SHIFT`` is the client's number; the bits below count its requests."""


def engine_address(folder: str) -> str:
    """Where the engine listens."""
    return f"ipc://{folder}/engine"


def client_address(folder: str, number: int) -> str:
    """Where a client listens."""
    return f"ipc://{folder}/client-{number}"


class Seat(msgspec.Struct, frozen=True):
    """Where a client joins an engine that another one has started."""

    folder: str
    """`Launch.folder`."""
    number: int
    """Of the client."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The engine process's only argument, as JSON. What code runs is decided here, never by a message."""

    folder: str
    """Private folder (mode 0700) of the sockets."""
    parent: int
    """Process id of client 0; the engine ends when it is gone."""
    core: str
    """``module:function``, called as ``function(config, progress) -> EngineCore``."""
    config: EngineConfig
    heartbeat_s: float
    log_level: int


# Client to engine.


class Join(msgspec.Struct, tag=True):
    """Client 0 has admitted another one. The engine sends it `Ready` as soon as it is. Both this and `Leave` come from
    client 0, so that they come in order."""

    client: int


class Leave(msgspec.Struct, tag=True):
    """A client is gone: its requests end, and nothing is sent to it any more."""

    client: int


class Add(msgspec.Struct, tag=True):
    request: Request


class Abort(msgspec.Struct, tag=True):
    """Ends a request, or one candidate of it. For one that has ended already it does nothing."""

    request: int
    candidate: int | None = None


class Shutdown(msgspec.Struct, tag=True):
    """Close the core and exit."""


ToEngine = Join | Leave | Add | Abort | Shutdown


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
    """All that one step brought one client. An output that is one token and nothing else is an entry of each of the
    three columns; they are most of the traffic."""

    stats: CoreStats
    requests: list[int] = []
    candidates: list[int] = []
    ids: list[int] = []
    others: list[CoreOutput] = []

    def add(self, output: CoreOutput) -> None:
        if (
            len(output.ids) == 1
            and output.finish is None
            and output.logprobs is None
            and output.prompt_logprobs is None
            and not output.cached_tokens
            and not output.queued_s
        ):
            self.requests.append(output.request)
            self.candidates.append(output.candidate)
            self.ids.append(output.ids[0])
        else:
            self.others.append(output)

    def __iter__(self) -> Iterator[CoreOutput]:
        for request, candidate, token in zip(self.requests, self.candidates, self.ids, strict=True):
            yield CoreOutput(request=request, candidate=candidate, ids=[token])
        yield from self.others


class Beat(msgspec.Struct, tag=True):
    """Sign of life to every client, from a thread beside the loop."""

    step_age: float
    """Seconds since the step under way began; 0 between steps."""
    leaks: int
    """Idle checks that failed since the start."""
    stats: CoreStats


class Failed(msgspec.Struct, tag=True):
    """The engine's last words."""

    reason: str
    traceback: str
    """Empty for what the user can correct: a checkpoint or a knob."""


ToClient = Loading | Ready | Outputs | Beat | Failed
