"""HTTP and event-stream framing, in any split."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.lab.client.event_stream import EventStream
from paceline.lab.client.http_reply import HttpReply, InvalidReply

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in pairwise(edges) if b > a]


def read(parts: list[bytes]) -> tuple[HttpReply, bytes]:
    reply = HttpReply()
    return reply, b"".join([reply.feed(part) for part in parts])


@given(
    st.lists(st.binary(min_size=1, max_size=40) | st.just(b"\r\n0\r\n\r\n"), max_size=6),
    st.lists(st.integers(0, 1000), max_size=12),
    st.sampled_from([b"0\r\n\r\n", b"0;last\r\nX-Trailer: 1\r\nY: 2\r\n\r\n", b"00\r\n\r\n"]),
    st.sampled_from([b"%x", b"%X", b"%x;name=value", b"00%x"]),
)
def test_chunked_body_in_any_split(bodies: list[bytes], places: list[int], end: bytes, size: bytes) -> None:
    data = HEAD + b"".join(size % len(body) + b"\r\n" + body + b"\r\n" for body in bodies) + end
    reply, body = read(cut(data, places))
    assert body == b"".join(bodies)
    assert reply.complete
    assert reply.reusable
    assert reply.status == 200
    assert reply.fields["content-type"] == "text/event-stream"
    incomplete, _ = read(cut(data[:-1], places))
    assert not incomplete.complete
    incomplete.end()
    assert not incomplete.complete


@given(st.binary(max_size=60), st.lists(st.integers(0, 1000), max_size=8))
def test_body_of_known_length(body: bytes, places: list[int]) -> None:
    data = b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    reply, read_body = read(cut(data, places))
    assert (read_body, reply.complete, reply.status) == (body, True, 400)


def test_body_until_the_connection_is_closed() -> None:
    reply, body = read([b"HTTP/1.1 200 OK\r\n\r\nabc", b"def"])
    assert body == b"abcdef"
    assert not reply.complete
    reply.end()
    assert reply.complete


def test_connections_that_cannot_be_used_again() -> None:
    assert not read([b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nConnection: close\r\n\r\na"])[0].reusable
    assert not read([b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\na"])[0].reusable
    assert not read([b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nab"])[0].reusable
    assert not read([HEAD + b"0\r\n\r\nHTTP/1.1 200"])[0].reusable


def test_interim_reply_is_passed_over() -> None:
    reply, body = read([b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 20", b"0 OK\r\nContent-Length: 2\r\n\r\nok"])
    assert (reply.status, body, reply.complete) == (200, b"ok", True)


@pytest.mark.parametrize("data", [b"SSH-2.0-x\r\n", b"HTTP/1.1 abc\r\n\r\n", HEAD + b"xyz\r\n", HEAD + b"-1\r\n"])
def test_what_is_not_http(data: bytes) -> None:
    with pytest.raises(InvalidReply):
        read([data])


LINES = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=12)


@given(
    st.lists(st.lists(LINES, min_size=1, max_size=3), max_size=5),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.sampled_from([b"data: ", b"data:"]),
    st.booleans(),
    st.lists(st.integers(0, 1000), max_size=12),
)
def test_events_in_any_split(
    events: list[list[str]], end: bytes, field: bytes, comments: bool, places: list[int]
) -> None:
    text = b""
    for lines in events:
        text += b": ping" + end + end if comments else b""
        text += b"".join(field + line.removeprefix(" ").encode() + end for line in lines) + end
    stream = EventStream()
    found = [each for part in cut(text, places) for each in stream.feed(part)] + stream.end()
    assert found == [(b"", "\n".join(line.removeprefix(" ") for line in lines).encode()) for lines in events]


def test_an_event_comes_with_the_bytes_that_complete_it() -> None:
    stream = EventStream()
    assert stream.feed(b"data: 1\n") == []
    assert stream.feed(b"\ndata: 2\n\ndata: 3") == [(b"", b"1"), (b"", b"2")]
    assert stream.feed(b"\r\n\r") == []
    assert stream.feed(b"\n") == [(b"", b"3")]


def test_event_types_and_fields_that_say_nothing() -> None:
    stream = EventStream()
    text = b"id: 7\nretry: 100\nevent: error\ndata: x\n\nevent: y\n\ndata\n\ndata: z\n\n"
    assert stream.feed(text) == [(b"error", b"x"), (b"", b""), (b"", b"z")]
    assert stream.feed(b"event: error\n") == []
    assert stream.feed(b"data: w\n\n") == [(b"error", b"w")]
