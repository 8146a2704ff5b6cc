"""From the bytes of one reply and their times to its record."""

from collections.abc import Iterable

import msgspec

from paceline.lab.client.completion_chunk import CompletionChunk, Usage, count_of
from paceline.lab.client.event_stream import EventStream
from paceline.lab.client.http_reply import HttpReply, InvalidReply
from paceline.lab.record import RequestRecord

DECODE = msgspec.json.Decoder(CompletionChunk).decode


class ReplyParser:
    """Fills a record. An event counts when the bytes that completed it arrived."""

    def __init__(self, record: RequestRecord, *, keep_text: bool = False) -> None:
        self.record = record
        self._keep_text = keep_text
        self._text: list[str] = []
        self._http = HttpReply()
        self._events = EventStream()
        self._body: list[bytes] | None = None
        """Of a reply that is not an event stream."""
        self._done = False
        """Whether ``[DONE]`` came, or a whole reply."""
        self._tokens = 0
        """Of all deltas so far."""
        self._seen: float | None = None
        """When the last byte arrived."""

    def feed(self, time: float, data: bytes) -> None:
        self._seen = time
        if self._http.complete:
            return
        try:
            body = self._http.feed(data)
        except InvalidReply as error:
            self._fail(str(error))
            return
        record = self.record
        if record.status is None:
            if self._http.status is None:
                return
            record.headers, record.status = time, self._http.status
            if record.status != 200 or "event-stream" not in self._http.fields.get("content-type", "event-stream"):
                self._body = []
        if self._http.complete:
            record.ended = time
        if self._body is not None:
            self._body.append(body)
        elif body:
            self._take(time, self._events.feed(body))

    def closed(self, time: float) -> None:
        """The server closed the connection."""
        complete = self._http.complete
        self._http.end()
        self.record.ended = self._seen if complete or self._seen is None else time
        if not self._http.complete and not self._done:
            where = "before its reply" if self._http.status is None else "in the middle of its reply"
            self._fail(f"the server closed the connection {where}")

    def finish(self) -> RequestRecord:
        """The record, when nothing more will come."""
        record = self.record
        if self._seen is not None:
            self._end_of_body(self._seen)
        if record.error is None and record.status == 200:
            if not self._done and record.deltas:
                self._fail("the stream ended early: no [DONE]")
            elif record.finish in ("abort", "error"):
                self._fail(f"finish reason {record.finish}")
            elif not record.deltas:
                self._fail("empty reply")
        if self._keep_text:
            record.text = "".join(self._text)
        if record.wrong_usage is not None:
            record.output_tokens = None
        if record.deltas and not record.counted and record.output_tokens is not None:
            last = record.output_tokens - (len(record.deltas) - 1)
            record.deltas[-1] = (record.deltas[-1][0], max(1, last))
        return record

    def _end_of_body(self, time: float) -> None:
        if self._body is None:
            self._take(time, self._events.end())
        elif self.record.status != 200:
            self._fail(f"HTTP {self.record.status}: {_message(b''.join(self._body))}".rstrip(": "))
        elif any(self._body):  # A whole reply at once: every token arrived with it.
            self._take(time, [(b"", b"".join(self._body))])
            self._done = True

    def _take(self, time: float, events: Iterable[tuple[bytes, bytes]]) -> None:
        record = self.record
        for kind, data in events:
            if data == b"[DONE]":
                self._done = True
                continue
            try:
                chunk = DECODE(data)
            except msgspec.DecodeError as error:
                self._fail(_message(data) if kind == b"error" else f"an event is not a completion chunk: {error}")
                continue
            if (failure := chunk.failure) is not None or kind == b"error":
                self._fail(failure or _message(data))
            generated = False
            for choice in chunk.choices or ():
                generated = generated or choice.generated
                record.finish = choice.finish_reason or record.finish
                if self._keep_text:
                    self._text.append(choice.content)
            ids = sum(len(choice.token_ids) for choice in chunk.choices or () if choice.token_ids)
            self._count(time, chunk.usage, generated, ids, alone=not chunk.choices)

    def _count(self, time: float, usage: Usage | None, generated: bool, ids: int, alone: bool) -> None:
        """Adds a delta if the chunk carries a token. ``ids``: how many token ids it has; ``alone``: no choices."""
        record = self.record
        rise: int | None = ids or None
        if usage is not None:
            prompt, output = count_of(usage.prompt_tokens), count_of(usage.completion_tokens)
            record.prompt_tokens = record.prompt_tokens if prompt is None else prompt
            if usage.prompt_tokens_details is not None:
                record.cached_tokens = count_of(usage.prompt_tokens_details.cached_tokens)
            if output is None and usage.completion_tokens is not None:
                record.wrong_usage = msgspec.json.encode(usage.completion_tokens).decode()[:40]
            if output is not None:
                record.output_tokens = output
                rise = output - self._tokens
                # The usage at the end is no delta, unless it is the first to show any token.
                if alone and record.deltas:
                    return
        if not record.deltas:
            if not generated and not (rise or 0) > 0:
                return
            record.counted = rise is not None
            tokens = max(1, rise or 0)
        elif record.counted and rise is not None:
            tokens = rise  # Text without a new token is what was held back of earlier ones.
        else:
            tokens = int(generated)
        if tokens > 0:
            self._tokens += tokens
            record.deltas.append((time, tokens))

    def _fail(self, error: str) -> None:
        if self.record.error is None:
            self.record.error = error


def _message(data: bytes) -> str:
    """What an error says, as JSON or as it is."""
    try:
        return DECODE(data).failure or data[:200].decode(errors="replace")
    except msgspec.DecodeError:
        return data[:200].decode(errors="replace")
