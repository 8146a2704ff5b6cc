"""What passes between a stage's parent and its workers.

To a worker's standard input: the length of the plan, the plan, and when the worker has said that it is ready the start.
"""

from struct import Struct
from typing import Any, NamedTuple

import msgspec

from paceline.lab.client.address import Address
from paceline.lab.client.request_bytes import RequestMaker

LENGTH = Struct("<Q")
START = Struct("<d")
"""Seconds by the monotonic clock, which all processes of a machine share."""


class Turn(msgspec.Struct, frozen=True):
    """Of a request that needs the reply of another, or whose own reply is needed."""

    messages: list[dict[str, Any]]
    """The conversation without replies of this run."""
    output_tokens: int


class Item(msgspec.Struct, frozen=True):
    """One request of a worker."""

    id: int
    due: float
    """Seconds from the start; with ``after`` from the end of that request."""
    after: int | None
    payload: bytes
    """Ready to be sent; empty where the reply of ``after`` is needed to make it."""
    turn: Turn | None = None


class Plan(msgspec.Struct, frozen=True):
    log: str
    """Path of the file that exists and has its header."""
    address: Address
    maker: RequestMaker
    deadline_s: float
    items: list[Item]


class Counters(NamedTuple):
    """A worker's news on its standard output, packed; the first says that it is ready."""

    sent: int = 0
    ended: int = 0
    failed: int = 0
    """Of those ended, as far as is known without reading a reply: no connection, or a status other than 200."""


COUNTERS = Struct("<3Q")
