"""The socket on which a server listens."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.server.config import ServerConfig


class StartError(Exception):
    """The server cannot start; the message says why and what to do."""


@contextmanager
def bound(config: ServerConfig) -> Iterator[socket.socket]:
    """The bound socket. Bound before the model loads, so that a port in use is known at once; clients can connect
    only once the server is ready."""
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartError(f"the host {config.host!r} is no address of this machine: {error.strerror}") from error
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it: without it every other small write waits 40 ms for an acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            listener.bind(address)
        except OSError as error:
            raise StartError(
                f"cannot listen on {config.host} port {config.port}: {error.strerror}; choose another with --port"
            ) from error
        yield listener


def url(config: ServerConfig, listener: socket.socket) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http://{host}:{listener.getsockname()[1]}"
