"""The read-answer loop of `paceline chat`, whoever gives the answers."""

from collections.abc import Generator
from typing import Protocol, TextIO

from paceline.engine.invalid import InvalidRequest

Message = dict[str, str]

# What a model writes must not drive the terminal: control characters but tab and newline are shown as U+FFFD.
_HARMLESS = {code: "\ufffd" for code in [*range(0x20), *range(0x7F, 0xA0)] if code not in (0x09, 0x0A)}


class Backend(Protocol):
    """Answers a conversation."""

    def reply(self, messages: list[Message]) -> Generator[str, None, None]:
        """Yields the answer piece by piece; closing the iterator stops it.

        Raises:
            InvalidRequest: the conversation cannot be answered as it stands, for example because it is too long.
            EngineDead, OSError: nothing can be answered any more.
        """


def converse(backend: Backend, messages: list[Message], source: TextIO, out: TextIO) -> None:
    """Answers turn by turn on a terminal; elsewhere takes all of ``source`` as the one message."""
    if not source.isatty():
        text = source.read().strip()
        if not text:
            raise InvalidRequest("input", "is empty")
        for piece in backend.reply([*messages, {"role": "user", "content": text}]):
            _write(out, piece)
        out.write("\n")
        return
    import readline  # noqa: F401  # gives input() its history and line editing

    start = list(messages)
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            out.write("\n")
            return
        if text == "/quit":
            return
        if text == "/clear":
            messages = list(start)
        elif text.startswith("/"):
            out.write("Commands: /clear starts afresh, /quit leaves\n")
        elif text:
            messages = _turn(backend, [*messages, {"role": "user", "content": text}], out)


def _turn(backend: Backend, messages: list[Message], out: TextIO) -> list[Message]:
    """The conversation after one more answer; what a Ctrl-C left of it counts."""
    pieces: list[str] = []
    answer = backend.reply(messages)
    try:
        for piece in answer:
            pieces.append(piece)
            _write(out, piece)
    except KeyboardInterrupt:
        out.write(" [stopped]")
    except InvalidRequest as error:
        out.write(f"Error: {error} (/clear starts afresh)\n")
        return messages[:-1]
    finally:
        answer.close()
    out.write("\n")
    return [*messages, {"role": "assistant", "content": "".join(pieces)}]


def _write(out: TextIO, text: str) -> None:
    out.write(text.translate(_HARMLESS))
    out.flush()
