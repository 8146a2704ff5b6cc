"""Turns of conversations, each of which needs the reply before."""

from collections.abc import Iterable
from typing import Any

from paceline.lab.client.plan import Item
from paceline.lab.client.reply_parser import ReplyParser
from paceline.lab.client.request_bytes import RequestMaker, with_reply
from paceline.lab.record import RequestRecord


class Turns:
    """Reads the replies that are needed as they arrive; those of all other requests pass by."""

    def __init__(self, items: Iterable[Item], maker: RequestMaker) -> None:
        self._items = {item.id: item for item in items if item.turn is not None}
        self._needed = {item.after for item in self._items.values() if not item.payload}
        self._maker = maker
        self._sent: dict[int, list[Any]] = {}
        """Messages of requests whose reply is needed."""
        self._parsers: dict[int, ReplyParser] = {}
        """Of the same requests."""

    def payload(self, item: Item, due: float) -> bytes:
        """The request's bytes. The reply that it needs, if any, must have come."""
        turn = item.turn
        if turn is None:
            return item.payload
        messages, payload = turn.messages, item.payload
        if not payload:
            assert item.after is not None
            before, reply = self._items[item.after].turn, self._parsers[item.after].record.text
            assert before is not None
            assert reply is not None
            messages = with_reply(self._sent[item.after], len(before.messages), reply, messages)
            payload = self._maker.make(messages, turn.output_tokens)
        if item.id in self._needed:
            self._sent[item.id] = messages
            self._parsers[item.id] = ReplyParser(RequestRecord(item.id, due), keep_text=True)
        return payload

    def feed(self, id: int, time: float, data: bytes) -> None:
        if id in self._parsers:
            self._parsers[id].feed(time, data)

    def closed(self, id: int, time: float) -> None:
        if id in self._parsers:
            self._parsers[id].closed(time)

    def failed(self, id: int, error: str) -> None:
        if id in self._parsers:
            self._parsers[id].record.error = error

    def answered(self, id: int) -> bool:
        """Whether a reply that is needed is there, when nothing more of it will come."""
        return id in self._parsers and self._parsers[id].finish().ok
