"""Where a server listens."""

import socket
from typing import Any
from urllib.parse import urlsplit

import msgspec

from paceline.lab.target import Target


class Address(msgspec.Struct, frozen=True):
    """A server's URL, resolved once."""

    family: int
    endpoint: tuple[Any, ...]
    """As `socket.connect` takes it."""
    tls: str | None
    """Name that the certificate must have; None: no TLS."""
    host: str
    """As the Host field has it."""
    prefix: str
    """Path before ``/v1``."""


def resolve(target: Target) -> Address:
    """Takes the first address that accepts a connection, or the first if none does.

    Raises:
        ValueError: no http or https URL, or its name is unknown.
    """
    url = urlsplit(target.url)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError(f"target {target.name}: {target.url!r} is not a URL of http or https")
    try:
        port = url.port or (443 if url.scheme == "https" else 80)
        found = socket.getaddrinfo(url.hostname, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(f"target {target.name}: {url.hostname}: {error.strerror}") from error
    for family, _, _, _, endpoint in found:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.settimeout(5)
            if trial.connect_ex(endpoint) == 0:
                break
    else:
        family, _, _, _, endpoint = found[0]
    tls = url.hostname if url.scheme == "https" else None
    return Address(family, endpoint, tls, url.netloc.rpartition("@")[2], url.path.rstrip("/"))
