"""An engine to be measured."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Target:
    """An OpenAI-compatible server."""

    name: str
    """In reports."""
    url: str
    """Up to and without ``/v1``: ``http://127.0.0.1:8000``."""
    model: str
    """As requests name it."""
    command: tuple[str, ...] = ()
    """Starts it; empty: it runs already."""
    env: dict[str, str] = field(default_factory=dict)
    api_key: str | None = None
    ready_s: float = 600.0
    """Seconds that ``command`` may take until ``/v1/models`` answers."""
    tokenizer: str | None = None
    """Folder or alias whose tokenizer makes prompts where the server takes no token ids."""
