"""Finds out which fields a server takes, with requests of one token."""

import socket
import ssl
import time
from itertools import product

from paceline.lab.client.address import Address
from paceline.lab.client.http_reply import HttpReply, InvalidReply
from paceline.lab.client.request_bytes import RequestMaker, ServerOptions, is_chat
from paceline.lab.stage import Prompt, Stage
from paceline.lab.target import Target

TIMEOUT_S = 60.0


def probe(target: Target, stage: Stage, address: Address) -> ServerOptions:
    """The most that the server does not refuse (400 or 422). One that cannot be reached or fails in another way is
    asked for everything: the stage's requests will say what is wrong."""
    everything = ServerOptions(ignore_eos=stage.ignore_eos)
    if not stage.requests:
        return everything
    prompt = _short(stage.requests[0].prompt)
    options = everything
    for ignore_eos, usage in product((True, False) if stage.ignore_eos else (False,), ("continuous", "final", "none")):
        options = ServerOptions(usage, ignore_eos)
        request = RequestMaker.of(target, stage, options, address.host, address.prefix).make(prompt, 1)
        try:
            status = _status(address, request, min(TIMEOUT_S, stage.deadline_s))
        except (OSError, InvalidReply):
            return everything
        if status not in (400, 422):
            return options if status == 200 else everything
    return options


def _short(prompt: Prompt) -> Prompt:
    if isinstance(prompt, str):
        return "Hello"
    return [{"role": "user", "content": "Hello"}] if is_chat(prompt) else prompt[:1]


def _status(address: Address, request: bytes, timeout_s: float) -> int | None:
    """HTTP status, once the reply is complete or the time is over. Raises OSError, InvalidReply."""
    limit = time.monotonic() + timeout_s
    with socket.socket(address.family, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout_s)
        sock.connect(address.endpoint)
        if address.tls is not None:
            sock = ssl.create_default_context().wrap_socket(sock, server_hostname=address.tls)
        with sock:
            sock.sendall(request)
            reply = HttpReply()
            while not reply.complete and time.monotonic() < limit:
                data = sock.recv(1 << 16)
                if not data:
                    break
                reply.feed(data)
            return reply.status
