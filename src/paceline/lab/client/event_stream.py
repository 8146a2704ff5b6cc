"""Server-sent events, fed in any split: LF, CRLF or CR, comments, ``data:`` with and without space, several data lines
(https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream)."""

import re

LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")
"""A carriage return at the very end may be half of a line end: it waits for the next byte."""


class EventStream:
    __slots__ = ("_data", "_event", "_rest")

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._event = b""

    def feed(self, text: bytes) -> list[tuple[bytes, bytes]]:
        """(type, data) of the events that ``text`` completes; the type is empty where none was given."""
        if not self._rest and not self._data and text.startswith(b"data: ") and text.endswith(b"\n\n"):
            lines = text[6:-2]
            if b"\n" not in lines and b"\r" not in lines:  # One whole event, as nearly always.
                return [(b"", lines)] if not self._event else self._take(text)
        return self._take(text)

    def end(self) -> list[tuple[bytes, bytes]]:
        """The stream is over: an event whose blank line is missing. The standard drops it; servers that close right
        after ``[DONE]`` do exist."""
        return self._take(b"\n\n" if not self._rest.endswith(b"\r") else b"\n\n\n")

    def _take(self, text: bytes) -> list[tuple[bytes, bytes]]:
        events = []
        *lines, self._rest = LINE_END.split(self._rest + text)
        for line in lines:
            if not line:
                if self._data:
                    events.append((self._event, b"\n".join(self._data)))
                self._data, self._event = [], b""
                continue
            name, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if name == b"data":
                self._data.append(value)
            elif name == b"event":
                self._event = value
        return events
