"""What every HTTP request passes first: its id, its key, and whether the server still takes work."""

import hashlib
import hmac
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.server.errors import ApiError
from paceline.server.respond import PLAIN_SEND
from paceline.server.service import Service

OPEN = "/health"
"""The only route that needs no key."""
MAX_ID_CHARS = 128
REQUEST_ID = "X-Request-Id"


class Gate:
    """ASGI middleware. With API keys set every path but ``/health`` is closed, also paths that do not exist."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        # The server puts its root path before every path.
        self._open = service.config.root_path + OPEN
        self._keys = [_digest(key.encode()) for key in service.config.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = _request_id(headers)
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
                if message["status"] >= 400:
                    self._service.metrics.refuse(message["status"])
            await send(message)

        if self._keys and scope["path"] != self._open and not self._has_key(headers):
            error = ApiError(
                401,
                "a valid API key is needed: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer", "Connection": "close"},
            )
            await error.response()(scope, receive, send_with_id)
            return
        scope[PLAIN_SEND] = send
        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            # Here and not in a handler of the app: those for Exception stand outside of all middleware.
            if not started:
                error = ApiError(500, "internal error; the server's log has the details", code="internal_error")
                await error.response()(scope, receive, send_with_id)
            raise  # uvicorn logs it

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = _digest(key.strip().encode("latin-1"))
        # No early exit: the time says nothing about which key came close.
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        return scheme.lower() == "bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _request_id(headers: Headers) -> str:
    """The client's own id, which is only echoed, or a new one."""
    given = headers.get("x-request-id", "")
    if 0 < len(given) <= MAX_ID_CHARS and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex
