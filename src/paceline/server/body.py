"""Reading a request: bounded in size and time, then checked against its model."""

import asyncio
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import Request
from pydantic import ValidationError

from paceline.server.config import ServerConfig
from paceline.server.errors import ApiError, invalid
from paceline.server.fields import Fields

T = TypeVar("T", bound=Fields)

CLOSE = {"Connection": "close"}


async def read_fields(request: Request, model: type[T], config: ServerConfig) -> T:
    """The request's fields.

    Raises:
        ApiError: 400 naming the field, 408, 413 or 415.
        starlette.requests.ClientDisconnect: the client went away while sending.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"Content-Type must be application/json, not {kind or 'missing'}",
            code="unsupported_media_type",
        )
    return parse_fields(await _read(request, config), model)


def parse_fields(body: bytes, model: type[T]) -> T:
    try:
        fields = model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        path = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        message = message[:1].lower() + message[1:]
        raise invalid(path or None, message if path else f"the body: {message}") from error
    fields.refuse_unsupported()
    return fields


async def _read(request: Request, config: ServerConfig) -> bytes:
    limit = config.max_body_bytes
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(config.body_timeout_s):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise _too_large(limit)
                parts.append(part)
    except TimeoutError as error:
        message = f"the body took longer than {config.body_timeout_s:g} s to arrive"
        raise ApiError(HTTPStatus.REQUEST_TIMEOUT, message, code="request_timeout", headers=CLOSE) from error
    return b"".join(parts)


def _too_large(limit: int) -> ApiError:
    message = f"the body is larger than {limit} bytes"
    return ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, code="body_too_large", headers=CLOSE)


def body_schema(model: type[Fields]) -> dict[str, Any]:
    """What FastAPI's ``openapi_extra`` needs to describe a body that `read_fields` reads."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": model.model_json_schema()}}}}
