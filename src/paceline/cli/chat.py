"""`paceline chat`: a conversation in the terminal."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from paceline.cli.conversation import Backend, converse
from paceline.cli.errors import bad_values, fail, failures
from paceline.cli.options import Knobs, expand
from paceline.cli.serve import MODEL_HELP
from paceline.engine.config import EngineConfig
from paceline.engine.sampling_params import SamplingParams

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop", "max_tokens")


@expand
def chat(
    engine: Annotated[dict[str, Any], Knobs(EngineConfig, "Engine (not with --url)", leave_out=("model",))],
    sampling: Annotated[dict[str, Any], Knobs(SamplingParams, "Sampling", only=SAMPLING, defaults="the model's own")],
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP + " With --url: a name the server knows.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    url: Annotated[str | None, typer.Option(help="Talk to this running server instead of starting an engine.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Key for the server at --url.")] = None,
) -> None:
    """Chat with MODEL in the terminal, or answer what is piped in.

    Ctrl-C stops an answer, /clear starts afresh, /quit or Ctrl-D leaves.
    """
    messages = [{"role": "system", "content": system}] if system else []
    with failures(), _backend(model, url, api_key, engine, sampling) as backend:
        converse(backend, messages, sys.stdin, sys.stdout)


@contextlib.contextmanager
def _backend(
    model: str | None, url: str | None, api_key: str | None, engine: dict[str, Any], sampling: dict[str, Any]
) -> Iterator[Backend]:
    if url is not None:
        if engine:
            options = ", ".join("--" + name.replace("_", "-") for name in engine)
            raise fail(f"the engine behind --url is configured where it runs; leave out {options}", code=2)
        from paceline.cli.remote import RemoteChat

        with bad_values():
            SamplingParams(**sampling)
            remote = RemoteChat(url, model, api_key, sampling)
        yield remote
        return
    if model is None:
        raise fail("give a MODEL to load, or the --url of a running server", code=2)
    if api_key is not None:
        raise fail("--api-key goes with --url", code=2)
    from paceline.cli.local import LocalChat

    with bad_values():
        SamplingParams(**sampling)
        config = EngineConfig(model=model, **engine)
    with LocalChat(config, sampling) as local:
        yield local
