"""Where an HTTP/1.1 reply ends, and its body; fed with whatever the socket gave, in any split (RFC 9112)."""


class InvalidReply(ValueError):
    """What came is not HTTP."""


class HttpReply:
    """One reply. The load client only asks whether it is complete; the log's reader also takes the body."""

    __slots__ = ("_body", "_left", "_rest", "complete", "fields", "reusable", "status")

    def __init__(self) -> None:
        self.status: int | None = None
        """None until the header section is complete."""
        self.fields: dict[str, str] = {}
        """Header fields, names in lower case."""
        self.complete = False
        self.reusable = False
        """Whether the connection may carry another request once this reply is complete."""
        self._rest = b""
        self._left = 0
        """Of the body; of a chunk with the line end after it."""
        self._body = self._head

    @property
    def untouched(self) -> bool:
        """Whether nothing has come yet."""
        return self.status is None and not self._rest

    def feed(self, data: bytes) -> bytes:
        """The part of the body that ``data`` holds. Raises `InvalidReply`."""
        return self._body(data)

    def end(self) -> None:
        """The server has closed the connection; only a body without a length is complete then."""
        self.reusable = False
        if self._body == self._until_closed:
            self.complete = True

    def _head(self, data: bytes) -> bytes:
        self._rest += data
        end = self._rest.find(b"\r\n\r\n")
        if end < 0:
            if not self._rest.startswith(b"HTTP/1."[: len(self._rest)]):
                raise InvalidReply(f"not an HTTP reply: {self._rest[:40]!r}")
            return b""
        lines = self._rest[:end].decode("latin-1").split("\r\n")
        data, self._rest = self._rest[end + 4 :], b""
        version, _, status = lines[0].partition(" ")
        if not version.startswith("HTTP/1.") or not status[:3].isdigit():
            raise InvalidReply(f"not an HTTP reply: {lines[0][:40]!r}")
        if status.startswith("1"):  # An interim reply; the final one follows.
            return self._head(data)
        self.status = int(status[:3])
        for line in lines[1:]:
            name, _, value = line.partition(":")
            self.fields[name.strip().lower()] = value.strip()
        connection = self.fields.get("connection", "").lower()
        self.reusable = "close" not in connection if version == "HTTP/1.1" else "keep-alive" in connection
        if "chunked" in self.fields.get("transfer-encoding", "").lower():
            self._body = self._chunked
        elif self.status in (204, 304) or "content-length" in self.fields:
            length = "0" if self.status in (204, 304) else self.fields["content-length"]
            if not length.isdigit():
                raise InvalidReply(f"content-length {length[:40]!r}")
            self._left = int(length)
            self._body = self._of_length
        else:
            self._body = self._until_closed
        return self._body(data)

    def _chunked(self, data: bytes) -> bytes:
        if self._rest:
            data, self._rest = self._rest + data, b""
        parts = []
        at, size, left = 0, len(data), self._left
        while at < size:
            if left > 2:
                part = data[at : at + left - 2]
                parts.append(part)
                at += len(part)
                left -= len(part)
            elif left:
                step = min(left, size - at)
                at += step
                left -= step
            else:
                end = data.find(b"\r\n", at)
                if end < 0:
                    self._rest = data[at:]
                    break
                line = data[at:end]
                at = end + 2
                digits = line.partition(b";")[0]
                try:
                    length = int(digits, 16)
                except ValueError:
                    length = -1
                if length < 0:
                    raise InvalidReply(f"not the size of a chunk: {line[:40]!r}")
                if length == 0:
                    self._body = self._trailers
                    self._trailers(data[at:])
                    break
                left = length + 2
        self._left = left
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _trailers(self, data: bytes) -> bytes:
        self._rest += data
        # The line end of the last chunk's size is put back: it and an empty line end the trailers too.
        _, end, surplus = (b"\r\n" + self._rest).partition(b"\r\n\r\n")
        if end:
            self.complete = True
            self._body = self._surplus
            self._surplus(surplus)
        return b""

    def _of_length(self, data: bytes) -> bytes:
        body, surplus = data[: self._left], data[self._left :]
        self._left -= len(body)
        if not self._left:
            self.complete = True
            self._body = self._surplus
            self._surplus(surplus)
        return body

    def _until_closed(self, data: bytes) -> bytes:
        return data

    def _surplus(self, data: bytes) -> bytes:
        if data:
            self.reusable = False
        return b""
