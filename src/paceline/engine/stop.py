"""Stop strings: found in the text, wherever token boundaries fall."""


class StopStrings:
    """Watches one text that grows piece by piece, and holds back what could still become a stop string.

    The stop string whose last character comes first wins, whatever pieces the text arrives in; of several that end
    there, the longest.

    Args:
        stops: none of them empty.
        include: whether the text keeps the stop string that ended it.

    Attributes:
        held: the longest end of the text that begins a stop string; not yet given out.
    """

    __slots__ = ("_firsts", "_include", "_lasts", "_longest", "_stops", "held")

    def __init__(self, stops: tuple[str, ...], include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._firsts = frozenset(stop[0] for stop in stops)
        self._lasts = frozenset(stop[-1] for stop in stops)
        self._longest = max(map(len, stops), default=0)
        self.held = ""

    def push(self, text: str, may_stop: bool = True) -> tuple[str, str | None]:
        """Takes the next piece.

        Args:
            text: the piece.
            may_stop: False passes over stop strings that end inside this piece.

        Returns:
            The text that is now certain, and the stop string that ended it. After a stop nothing may be pushed.
        """
        may_stop = may_stop and not self._lasts.isdisjoint(text)
        old = len(self.held)
        text = self.held + text
        if may_stop and (found := self._find(text, old)):
            end, stop = found
            self.held = ""
            return text[: end if self._include else end - len(stop)], stop
        keep = self._certain(text)
        self.held = text[keep:]
        return text[:keep], None

    def flush(self) -> str:
        """The end of the text without a stop: what was held back."""
        text, self.held = self.held, ""
        return text

    def _find(self, text: str, old: int) -> tuple[int, str] | None:
        """The first match that ends beyond the first ``old`` characters: (its end, the stop string)."""
        best: tuple[int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, old - len(stop) + 1))
            if start >= 0:
                end = start + len(stop)
                if best is None or (end, -len(stop)) < (best[0], -len(best[1])):
                    best = end, stop
        return best

    def _certain(self, text: str) -> int:
        """Characters before the longest end of ``text`` that begins a stop string and is not all of it."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._firsts:
                tail = text[start:]
                if any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._stops):
                    return start
        return len(text)
