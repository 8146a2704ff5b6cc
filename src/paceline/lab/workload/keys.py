"""Reads the keys of one table of an experiment, and names the key in every error."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.lab.workload.invalid import InvalidWorkload


class Keys:
    """Each method takes one key, which is required unless there is a default. `end` refuses what nobody asked for.

    Args:
        table: as TOML or flags gave it.
        where: goes before the key in errors: ``"input."`` for a table ``input``.
    """

    def __init__(self, table: Mapping[str, Any], where: str = "") -> None:
        self._table = table
        self._where = where
        self._known: set[str] = set()

    def has(self, key: str) -> bool:
        self._known.add(key)
        return key in self._table

    def value(self, key: str, default: Any = None) -> Any:
        """As it is. Raises InvalidWorkload where it is missing, as all others do."""
        if not self.has(key) and default is None:
            raise self.error(key, "is missing")
        return self._table.get(key, default)

    def whole(self, key: str, default: int | None = None, low: int = 1) -> int:
        value = self.value(key, default)
        if type(value) is not int or value < low:
            raise self.error(key, f"must be a whole number of at least {low}, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None, *, positive: bool = False) -> float:
        """Finite and at least 0, or ``positive``."""
        value = self.value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(key, f"must be a number, not {value!r}")
        if value < 0 or (positive and value == 0):
            raise self.error(key, f"must be {'above' if positive else 'at least'} 0, not {value!r}")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self.value(key, default)
        if not isinstance(value, str) or not value:
            raise self.error(key, f"must be text, not {value!r}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {value!r}")
        return value

    def choice(self, key: str, options: Sequence[str], default: str | None = None) -> Any:
        value = self.value(key, default)
        if value not in options:
            raise self.error(key, f"must be one of {', '.join(options)}, not {value!r}")
        return value

    def end(self) -> None:
        for key in self._table:
            if key not in self._known:
                raise self.error(key, f"is no key here; these are: {', '.join(sorted(self._known))}")

    def error(self, key: str, message: str) -> InvalidWorkload:
        return InvalidWorkload(f"{self._where}{key}: {message}")
