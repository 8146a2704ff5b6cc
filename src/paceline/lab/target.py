"""An engine to be measured."""

from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Target:
    """An OpenAI-compatible server."""

    name: str
    """In reports."""
    url: str
    """Up to and without ``/v1``: ``http://127.0.0.1:8000``."""
    model: str = ""
    """As requests name it; empty: the only one that the server has."""
    command: tuple[str, ...] = ()
    """Starts it; empty: it runs already."""
    env: dict[str, str] = field(default_factory=dict)
    api_key: str | None = None
    ready_s: float = 600.0
    """Seconds that ``command`` may take until ``/v1/models`` answers."""
    tokenizer: str | None = None
    """Folder or alias whose tokenizer makes prompts where the server takes no token ids."""


def server_url(text: str) -> str:
    """A server's URL without a ``/`` or ``/v1`` at its end.

    Raises:
        ValueError: it is no URL of http or https.
    """
    try:
        parts = urlsplit(text)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # A port that is no number, or too large.
        known = False
    if not known:
        raise ValueError(f"{text!r} is not like http://127.0.0.1:8000")
    return text.rstrip("/").removesuffix("/v1")
