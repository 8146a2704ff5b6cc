"""Numbers that all processes of a server share."""

import mmap
from pathlib import Path


class Board:
    """A table of float64, all 0 at first, one row a process. Everybody reads all rows and writes only its own, so
    nothing needs a lock.

    Args:
        rows: of all processes.
        width: numbers in a row.
        file: where all processes find it, or None for one process alone. The first one to open it creates it.
    """

    def __init__(self, rows: int, width: int, file: Path | None = None) -> None:
        size = 8 * rows * width
        if file is None:
            memory = mmap.mmap(-1, size)
        else:
            with file.open("ab+") as opened:
                opened.truncate(size)
                memory = mmap.mmap(opened.fileno(), size)
        numbers = memoryview(memory).cast("d")
        self.rows = [numbers[row * width : (row + 1) * width] for row in range(rows)]
