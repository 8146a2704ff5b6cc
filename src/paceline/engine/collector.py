"""Python's garbage collector in a process that must not pause."""

import gc

THRESHOLDS = (20_000, 20, 100)
"""Python's own would look at the tokens of all open requests again and again: 80 ms at a time for 500 long ones."""


def calm_collector() -> None:
    """What lives now is never looked at again, and the collector runs more rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
