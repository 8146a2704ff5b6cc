"""How an engine process fails its client."""


class EngineDead(RuntimeError):
    """The engine process cannot serve: it ended, failed to start, or is being closed."""


class EngineStuck(EngineDead):
    """The engine process lives but makes no progress. It may recover; requests that were open are lost."""
