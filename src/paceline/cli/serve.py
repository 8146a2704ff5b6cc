"""`paceline serve`: the OpenAI-compatible server."""

from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.errors import bad_values, fail
from paceline.cli.options import Knobs, expand
from paceline.engine.config import EngineConfig
from paceline.server.config import ServerConfig, read_api_keys

MODEL_HELP = "Alias (smollm2), folder, GGUF file, or hub id (ORG/NAME)."


@expand
def serve(
    engine: Annotated[dict[str, Any], Knobs(EngineConfig, "Engine", leave_out=("model",))],
    server: Annotated[dict[str, Any], Knobs(ServerConfig, "Server")],
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File of accepted API keys, one a line. Unlike --api-key it does not show them in the process list.",
            rich_help_panel="Server",
        ),
    ] = None,
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP + " With --simulate it may be left out.")] = None,
) -> None:
    """Serve MODEL over HTTP with the OpenAI API, until SIGTERM or Ctrl-C."""
    if model is None:
        if "simulate" not in engine:
            raise fail("MODEL is missing: what to serve", code=2)
        model = "smollm2"
    with bad_values():
        if api_key_file is not None:
            server["api_keys"] = (*server.get("api_keys", ()), *read_api_keys(api_key_file))
        engine_config, server_config = EngineConfig(model=model, **engine), ServerConfig(**server)
    # Imported late: FastAPI and the tokenizer take a second that --help should not.
    from paceline.server.serve import serve as run

    run(engine_config, server_config)
