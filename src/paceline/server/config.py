"""Every knob of the HTTP server, in one place."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.engine.sampling_params import MAX_CANDIDATES, MAX_LOGPROBS

LogLevel = Literal["debug", "info", "warning", "error"]

MAX_API_PROCESSES = 64
MAX_WAIT_S = 86_400
"""A day."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where to listen, who may come in, and how much one caller may ask for.

    Raises:
        ValueError: a value is out of range; names the field.
    """

    host: str = "127.0.0.1"
    """Address to listen on. Only this machine can reach the default."""
    port: int = 8000
    """0 takes a free one."""
    root_path: str = ""
    """Path prefix that a proxy in front strips, such as ``/llm``."""
    api_keys: tuple[str, ...] = ()
    """When any is given, every route but ``/health`` needs ``Authorization: Bearer KEY``."""
    served_model_names: tuple[str, ...] = ()
    """Names under which requests may ask for the model; the first one is reported. Empty: the model as it was given."""
    generation_defaults: bool = True
    """Take sampling defaults from the checkpoint's generation_config; else OpenAI's own."""
    max_body_bytes: int = 4 * 2**20
    """Largest request body. While one is parsed nothing else runs."""
    body_timeout_s: float = 60.0
    """Longest that a client may take to send a body."""
    max_prompts: int = 256
    """Most prompts in one completion request."""
    max_messages: int = 2048
    """Most messages in one chat request, and most content parts in all of them."""
    max_n: int = MAX_CANDIDATES
    """Most candidates a prompt."""
    max_logprobs: int = MAX_LOGPROBS
    """Most alternatives a token, for ``logprobs``, ``top_logprobs`` and ``prompt_logprobs``."""
    max_waiting: int = 8192
    """Most sequences (prompts x n) that wait for their first token at once; more get a 429."""
    max_concurrent: int = 4096
    """Most HTTP requests for text open at once; more get a 429."""
    api_processes: int | None = None
    """Processes that serve HTTP. None: one for every four cores, at most four."""
    tokenizer_threads: int = 2
    """Threads that render templates and tokenise, in each process that serves HTTP."""
    drain_timeout_s: float = 30.0
    """After SIGTERM or SIGINT, how long running requests may go on."""
    exit_timeout_s: float = 10.0
    """After draining, how long clients may take to receive the end of their replies."""
    log_level: LogLevel = "info"
    access_log: bool = False
    """A log line for every HTTP request."""
    socket_log: str | None = None
    """File that gets a line for every HTTP request: when it was at the socket, and when each part of its reply had been
    written there. With one API process; it takes some speed."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port: must be from 0 to 65535, not {self.port}")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ValueError(f"root_path: must start with / and not end with it, not {self.root_path!r}")
        if any(not key or key != key.strip() for key in self.api_keys):
            raise ValueError("api_keys: a key must not be empty, nor begin or end with a space")
        if any(not name for name in self.served_model_names):
            raise ValueError("served_model_names: a name must not be empty")
        for name in (
            "max_body_bytes",
            "max_prompts",
            "max_messages",
            "max_waiting",
            "max_concurrent",
            "tokenizer_threads",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, not {getattr(self, name)}")
        if self.api_processes is not None and not 1 <= self.api_processes <= MAX_API_PROCESSES:
            raise ValueError(f"api_processes: must be from 1 to {MAX_API_PROCESSES}, not {self.api_processes}")
        if self.socket_log is not None and self.api_processes not in (None, 1):
            raise ValueError(f"socket_log: goes with api_processes=1, not {self.api_processes}")
        if not 1 <= self.max_n <= MAX_CANDIDATES:
            raise ValueError(f"max_n: must be from 1 to {MAX_CANDIDATES}, not {self.max_n}")
        if not 0 <= self.max_logprobs <= MAX_LOGPROBS:
            raise ValueError(f"max_logprobs: must be from 0 to {MAX_LOGPROBS}, not {self.max_logprobs}")
        for name in ("body_timeout_s", "exit_timeout_s"):
            if not 0 < getattr(self, name) <= MAX_WAIT_S:
                raise ValueError(f"{name}: must be more than 0 and at most {MAX_WAIT_S}, not {getattr(self, name)}")
        if not 0 <= self.drain_timeout_s <= MAX_WAIT_S:
            raise ValueError(f"drain_timeout_s: must be from 0 to {MAX_WAIT_S}, not {self.drain_timeout_s}")


def read_api_keys(path: Path) -> tuple[str, ...]:
    """Keys from a file, one a line; blank lines and lines that start with ``#`` are skipped.

    Raises:
        ValueError: the file cannot be read or holds no key, which would leave the server open.
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the API key file {path}: {error}") from error
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ValueError(f"the API key file {path} holds no key")
    return keys
