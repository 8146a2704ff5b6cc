"""Errors in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from paceline.engine.invalid import InvalidRequest

RETRY_AFTER_S = 1
MAX_MESSAGE_CHARS = 2000
MAX_PARAM_CHARS = 200
"""Names of fields come from the client and may be as long as the body."""


class ApiError(Exception):
    """An answer other than 200.

    Attributes:
        status: HTTP status.
        message: what is wrong and what to do about it.
        param: the offending field, if one is to blame.
        code: a word for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _cut(message, MAX_MESSAGE_CHARS)
        self.param = param if param is None else _cut(param, MAX_PARAM_CHARS)
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, "invalid_request_error")
        if self.status >= 500:
            kind = "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return json_response(self.body, self.status, self.headers)


class Disconnected(Exception):
    """The client is gone; nobody reads the reply."""


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def invalid(field: str | None, message: str) -> ApiError:
    """400: the caller can correct ``field``."""
    text = message if field is None else f"{field}: {message}"
    return ApiError(HTTPStatus.BAD_REQUEST, text, code="invalid_value", param=field)


def busy(message: str) -> ApiError:
    """429: the same request can succeed later."""
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    return ApiError(HTTPStatus.TOO_MANY_REQUESTS, message, code="queue_full", headers=headers)


def unavailable(message: str, code: str) -> ApiError:
    """503: nothing can be served now. The connection is closed, so that a load balancer looks elsewhere."""
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code=code, headers={"Connection": "close"})


def failed(message: str) -> ApiError:
    """500: this request failed in the engine; others are unaffected."""
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, code="engine_error")


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Strict JSON: NaN and infinities cannot occur, msgspec writes them as null."""
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def known(_: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(ClientDisconnect)
    @app.exception_handler(Disconnected)
    async def gone(_: Request, __: Exception) -> Response:
        # Nobody reads it; 499 is what proxies log for such requests.
        return Response(status_code=499)

    @app.exception_handler(InvalidRequest)
    async def bad_request(_: Request, error: InvalidRequest) -> Response:
        return invalid(error.field, error.message).response()

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        code = HTTPStatus(error.status_code).name.lower()
        return ApiError(error.status_code, message, code=code, headers=error.headers).response()
