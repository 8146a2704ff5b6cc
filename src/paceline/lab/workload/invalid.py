"""The error for a workload that cannot be made."""


class InvalidWorkload(ValueError):
    """A file, key or value that gives no workload; the message names it and says what is allowed."""
