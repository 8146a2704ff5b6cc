"""The one error for a checkpoint that cannot be used."""


class CheckpointError(ValueError):
    """The files of a model are missing, broken or not supported. The message says which, and what to do next."""
