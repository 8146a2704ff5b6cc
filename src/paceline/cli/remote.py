"""Answers from a running OpenAI-compatible server."""

import json
from collections.abc import Generator
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from paceline.cli.conversation import Message
from paceline.engine.invalid import InvalidRequest

TIMEOUT_S = 300.0
"""Longest silence of the server; a long prompt on a slow machine needs some."""


class RemoteChat:
    """One conversation partner at ``url``, with or without its ``/v1``. Sampling options are sent when given.

    Raises:
        OSError: the server cannot be reached or broke off.
        ValueError: ``url`` is no URL, or the server refuses the request.
    """

    def __init__(self, url: str, model: str | None, api_key: str | None, sampling: dict[str, Any]) -> None:
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        if not self._base.startswith(("http://", "https://")):
            raise ValueError(f"--url: {url!r} does not start with http:// or https://")
        self._sampling = sampling
        self._model = model or self._first_model()

    def reply(self, messages: list[Message]) -> Generator[str, None, None]:
        body = {"model": self._model, "messages": messages, "stream": True, **self._sampling}
        with self._open("/chat/completions", body) as response:
            try:
                yield from _content(response)
            except HTTPException as error:
                raise OSError(f"{self._base} broke off: {error!r}") from error

    def _first_model(self) -> str:
        with self._open("/models", None) as response:
            models = json.load(response)["data"]
        if not models:
            raise OSError(f"{self._base} serves no model")
        return str(models[0]["id"])

    def _open(self, path: str, body: dict[str, Any] | None) -> HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        request = Request(self._base + path, data, self._headers)
        try:
            response: HTTPResponse = urlopen(request, timeout=TIMEOUT_S)
        except HTTPError as error:
            message = _error_text(error.read(), default=f"{error.code} {error.reason}")
            if error.code == 400:
                raise InvalidRequest("request", message) from None
            raise OSError(f"{self._base} answered {error.code}: {message}") from None
        except OSError as error:
            raise OSError(f"cannot reach {self._base}: {getattr(error, 'reason', error)}") from None
        return response


def _content(response: HTTPResponse) -> Generator[str, None, None]:
    """The text of a stream of server-sent events; an error event or an early end is an OSError."""
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise OSError(f"the server gave up: {_error_text(data, default='no reason given')}")
        for choice in event["choices"]:
            if text := choice["delta"].get("content"):
                yield text
    raise OSError("the server closed the stream before its end")


def _error_text(body: bytes, default: str) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return default
