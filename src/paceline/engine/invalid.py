"""The one error for input that a caller can correct."""


class InvalidRequest(ValueError):
    """A request that cannot be served as it stands; the HTTP layer turns it into a 400.

    Attributes:
        field: name of the offending field, as the caller wrote it (``"top_p"``, ``"prompt"``).
        message: what is wrong and which limit applies.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message
