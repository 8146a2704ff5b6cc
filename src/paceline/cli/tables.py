"""Tables in the terminal."""

from collections.abc import Sequence
from typing import Any

from rich.box import HEAVY_HEAD
from rich.console import Console
from rich.table import Table

NARROW = 110
"""Columns of a terminal below which a table has no lines and folded headers."""


def terminal(width: int) -> Console:
    """Standard output, so wide where it is a file."""
    return Console(width=None if Console().is_terminal else width)


def readable_table(console: Console, words: Sequence[str], numbers: Sequence[str], **more: Any) -> Table:
    """A table that folds words and never cuts a number, on a narrow terminal too.

    Args:
        words: columns to the left.
        numbers: columns to the right of these.
        more: goes to `rich.table.Table`.
    """
    narrow = console.width < NARROW
    table = Table(box=None if narrow else HEAVY_HEAD, pad_edge=not narrow, collapse_padding=narrow, **more)
    for name in words:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name.replace(" ", "\n") if narrow else name, justify="right", no_wrap=True)
    return table
