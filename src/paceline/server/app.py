"""The routes."""

import time
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from paceline.async_llm import AsyncLLM
from paceline.server.body import body_schema, read_fields
from paceline.server.config import ServerConfig
from paceline.server.errors import add_error_handlers, json_response
from paceline.server.fields import ChatFields, CompletionFields, DetokenizeFields, TokenizeFields
from paceline.server.gate import Gate
from paceline.server.metrics import Metrics
from paceline.server.service import Service

VERSION = version("paceline")


def create_app(llm: AsyncLLM, config: ServerConfig, metrics: Metrics | None = None) -> FastAPI:
    """The server as an ASGI app.

    Args:
        llm: started.
        config: limits, keys and names.
        metrics: of this process; None: of a server of one process.
    """
    service = Service(llm, config, metrics or Metrics())
    app = FastAPI(title="paceline", version=VERSION, redoc_url=None, swagger_ui_oauth2_redirect_url=None)
    app.state.service = service
    app.add_middleware(Gate, service=service)
    add_error_handlers(app)
    _add_openai_routes(app, service)
    _add_other_routes(app, service)
    return app


def _add_openai_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", openapi_extra=body_schema(CompletionFields))
    async def completions(request: Request) -> Response:
        arrival = time.monotonic()
        fields = await read_fields(request, CompletionFields, service.config)
        return await service.complete(fields, arrival, request.receive)

    @app.post("/v1/chat/completions", openapi_extra=body_schema(ChatFields))
    async def chat_completions(request: Request) -> Response:
        arrival = time.monotonic()
        fields = await read_fields(request, ChatFields, service.config)
        return await service.chat(fields, arrival, request.receive)

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [_model(service, name) for name in service.names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model(name)
        return json_response(_model(service, name))


def _add_other_routes(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", openapi_extra=body_schema(TokenizeFields))
    async def tokenize(request: Request) -> Response:
        return json_response(await service.tokenize(await read_fields(request, TokenizeFields, service.config)))

    @app.post("/detokenize", openapi_extra=body_schema(DetokenizeFields))
    async def detokenize(request: Request) -> Response:
        return json_response(await service.detokenize(await read_fields(request, DetokenizeFields, service.config)))

    @app.get("/health")
    @app.head("/health", include_in_schema=False)
    async def health() -> Response:
        trouble = service.trouble
        return json_response({"status": "ok"}) if trouble is None else trouble.response()

    @app.get("/version")
    async def engine_version() -> Response:
        return json_response({"version": VERSION})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics_text(), media_type=CONTENT_TYPE_LATEST)


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "paceline",
        "max_model_len": service.llm.limits.max_model_len,
    }
