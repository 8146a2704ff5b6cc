"""What a reply's bytes become: deltas, tokens, and what counts as a failure."""

from typing import Any

import pytest
from scripted_server import CHUNKED, END, SSE, UNTIL_CLOSED, chunk, delta, event, token, usage_chunk, usage_of, whole

from paceline.lab.client.reply_parser import ReplyParser
from paceline.lab.record import RequestRecord

DONE = chunk(event("[DONE]"))


def parse(*parts: bytes, closed: bool = False, text: bool = False) -> RequestRecord:
    """Of parts that arrive at 1, 2, 3, ... seconds."""
    parser = ReplyParser(RequestRecord(0, 0.5, sent=0.5), keep_text=text)
    for time, part in enumerate(parts, 1):
        parser.feed(float(time), part)
    if closed:
        parser.closed(len(parts) + 1.0)
    return parser.finish()


def reply(*events: Any, done: bool = True) -> RequestRecord:
    """Of a head at 1 s and one event a second after it; then the end."""
    parts = [CHUNKED, *(chunk(event(each)) for each in events)]
    return parse(*parts, (DONE if done else b"") + END, text=True)


def test_a_good_reply() -> None:
    record = reply(token("a"), token("b"), token("c", finish="length"), usage_chunk(3))
    assert record.ok
    assert record.deltas == [(2.0, 1), (3.0, 1), (4.0, 1)]
    assert (record.headers, record.ended, record.status) == (1.0, 6.0, 200)
    assert (record.prompt_tokens, record.output_tokens, record.finish) == (5, 3, "length")
    assert not record.counted
    assert record.text == "abc"
    assert record.ttft == 1.5
    assert record.tpot == 1.0


def test_every_split_gives_the_same_tokens() -> None:
    data = CHUNKED + chunk(event(token("é", usage=1), b"\r\n\r\n")) + chunk(b": x\n\n" + event(token("b", usage=2)))
    data += chunk(event(usage_chunk(2))) + DONE + END
    for size in range(1, len(data)):
        record = parse(*(data[at : at + size] for at in range(0, len(data), size)), text=True)
        assert record.ok, record.error
        assert [tokens for _, tokens in record.deltas] == [1, 1]
        assert record.text == "éb"
        # A delta has the time of the part with its event's last byte.
        first = data.index(b"\r\n\r\n", data.index("é".encode())) + 3
        assert record.first == first // size + 1


def test_a_chunk_that_holds_half_an_event() -> None:
    half = event(token("ab"))
    record = parse(CHUNKED + chunk(half[:9]), chunk(half[9:30]), chunk(half[30:] + event(token("c"))))
    assert [time for time, _ in record.deltas] == [3.0, 3.0]


def test_usage_chunks_have_no_choices() -> None:
    """public failure 95: usage chunks have an empty choices list."""
    record = reply(token("a"), usage_chunk(1), token("b", finish="stop"), {"choices": None, "usage": usage_of(2)})
    assert record.ok
    assert record.output_tokens == 2
    assert [time for time, _ in record.deltas] == [2.0, 4.0]


def test_continuous_usage_counts_tokens() -> None:
    role = {**delta(role="assistant", content=""), "usage": usage_of(0)}
    more = [{**delta(content="x"), "usage": usage_of(count)} for count in (2, 3, 7)]
    record = reply(role, *more, usage_chunk(7))
    assert record.counted
    assert record.deltas == [(3.0, 2), (4.0, 1), (5.0, 4)]
    assert record.output_tokens == 7


def test_usage_that_rises_is_a_token_whose_text_is_held_back() -> None:
    parts = [token("", usage=1), token("", usage=1), token("ab", usage=3, finish="length")]
    record = reply(*parts, usage_chunk(3))
    assert record.deltas == [(2.0, 1), (4.0, 2)]


def test_text_without_a_new_token_is_no_delta() -> None:
    """Nor does a count that comes late make tokens out of nothing."""
    parts = [token("a", usage=0), token("b", usage=2), token("c", usage=2), token("d"), token("e", usage=4)]
    record = reply(*parts, usage_chunk(4))
    assert record.counted
    assert record.deltas == [(2.0, 1), (3.0, 1), (5.0, 1), (6.0, 1)]


def test_usage_that_is_no_count_is_no_failure() -> None:
    """Of prompts and cached tokens it is as if the server did not say; of the reply the words are kept."""
    usage = {"prompt_tokens": "5", "completion_tokens": "2", "prompt_tokens_details": {"cached_tokens": True}}
    record = reply(token("a"), token("b", finish="stop"), {"choices": [], "usage": usage})
    assert record.ok
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (None, None, None)
    assert record.wrong_usage == '"2"'
    assert record.deltas == [(2.0, 1), (3.0, 1)]
    late = reply(token("a", usage=1), {**token("b"), "usage": {"completion_tokens": -2}}, usage_chunk(2))
    assert (late.output_tokens, late.wrong_usage) == (None, "-2")


def test_token_ids_count_as_well() -> None:
    parts = [{"choices": [{"text": text, "token_ids": ids}]} for text, ids in (("", [1]), ("ab", [2, 3]), ("", []))]
    record = reply(*parts, usage_chunk(3))
    assert record.counted
    assert record.deltas == [(2.0, 1), (3.0, 2)]


def test_usage_only_with_the_last_delta_counts_no_deltas() -> None:
    record = reply(token("a"), token("b"), token("c", usage=5, finish="length"))
    assert not record.counted
    assert record.deltas == [(2.0, 1), (3.0, 1), (4.0, 3)]
    assert record.output_tokens == 5


def test_a_reply_that_shows_nothing_but_its_usage() -> None:
    """Tokens without text, as special ones, are first seen in the usage."""
    record = reply(token("", finish="length"), usage_chunk(4))
    assert record.ok
    assert record.deltas == [(3.0, 4)]
    assert record.tpot is None


@pytest.mark.parametrize(
    "first",
    [
        delta(reasoning_content="hm"),
        delta(reasoning="hm"),
        delta(tool_calls=[{"index": 0, "function": {"arguments": "{"}}]),
        delta(refusal="no"),
    ],
)
def test_the_first_generated_delta_of_any_kind_counts(first: dict[str, Any]) -> None:
    """public failure 100: reasoning is generated, a role alone is not."""
    role = delta(role="assistant", content="")
    record = reply(role, delta(role="assistant"), first, delta(content="x"), usage_chunk(2))
    assert [time for time, _ in record.deltas] == [4.0, 5.0]
    assert record.text == "x"


def test_one_token_has_no_tpot() -> None:
    """public failure 98: not measured is None, never 0."""
    one = reply(token("a", finish="length"), usage_chunk(1))
    assert one.ok
    assert (one.ttft, one.tpot) == (1.5, None)
    together = reply(token("abc", finish="length"), usage_chunk(3))
    assert together.deltas == [(2.0, 3)]
    assert together.tpot is None
    several = parse(CHUNKED + chunk(event(token("a")) + event(token("b")) + event(usage_chunk(2))) + DONE + END)
    assert len(several.deltas) == 2
    assert several.tpot is None
    assert several.headers == several.first == 1.0
    never = RequestRecord(0, 0.0)
    assert (never.ttft, never.tpot, never.e2e, never.first) == (None, None, None, None)


ERRORS = [
    ({"error": {"message": "out of blocks", "code": 500}}, "out of blocks"),
    ({"error": "out of blocks"}, "out of blocks"),
    ({"object": "error", "message": "out of blocks"}, "out of blocks"),
    ({"detail": "out of blocks"}, "out of blocks"),
    ({"choices": [], "error": {"type": "overloaded"}}, "overloaded"),
]


@pytest.mark.parametrize(("error", "message"), ERRORS)
def test_an_error_inside_a_stream_is_a_failure(error: dict[str, Any], message: str) -> None:
    """public failure 94: an error event inside a 200 stream."""
    late = reply(token("a"), token("b"), token("c"), error, usage_chunk(16))
    assert late.error == message
    assert late.status == 200
    assert late.ttft is None
    assert late.e2e is None
    assert reply(error).error == message


def test_error_by_the_type_of_the_event() -> None:
    record = parse(CHUNKED, chunk(b"event: error\n" + event("worker died")), DONE + END)
    assert record.error == "worker died"


def test_a_stream_that_ends_early_is_a_failure() -> None:
    """public failure 94: the end of the connection without [DONE], whatever came before."""
    ended = reply(token("a"), token("b"), done=False)
    assert ended.error == "the stream ended early: no [DONE]"
    cut = parse(CHUNKED + chunk(event(token("a"))), chunk(event(token("b", finish="stop"))), closed=True)
    assert cut.error == "the server closed the connection in the middle of its reply"
    in_a_chunk = parse(CHUNKED + chunk(event(token("a")))[:-9], closed=True)
    assert in_a_chunk.error == cut.error
    assert reply(token("a"), token("b", finish="stop"), done=False).error == ended.error
    finished = parse(UNTIL_CLOSED, event(token("a")), event(token("b", finish="stop")), closed=True)
    assert finished.error == ended.error
    until_closed = parse(UNTIL_CLOSED, event(token("a")), closed=True)
    assert until_closed.error == ended.error
    silent = parse(b"", closed=True)
    assert silent.error == "the server closed the connection before its reply"


def test_a_stream_that_is_closed_after_its_end() -> None:
    assert parse(UNTIL_CLOSED, event(token("a")), event("[DONE]", b""), closed=True).ok
    assert parse(CHUNKED, chunk(event(token("a"))), DONE, closed=True).ok
    record = parse(UNTIL_CLOSED, event(token("a")), event("[DONE]"), closed=True)
    assert (record.ok, record.ended) == (True, 4.0)


@pytest.mark.parametrize(
    "record",
    [
        reply(),
        reply(token("", finish="stop"), usage_chunk(0)),
        reply(delta(role="assistant", content="")),
        parse(SSE + b"content-length: 0\r\n\r\n"),
    ],
)
def test_an_empty_reply_is_a_failure(record: RequestRecord) -> None:
    assert record.error == "empty reply"


def test_a_reply_that_was_aborted_is_a_failure() -> None:
    assert reply(token("a"), token("b", finish="abort"), usage_chunk(2)).error == "finish reason abort"


def test_http_errors() -> None:
    busy = parse(*whole("503 Service Unavailable", {"error": {"message": "too many requests wait"}}))
    assert (busy.error, busy.status) == ("HTTP 503: too many requests wait", 503)
    text = parse(b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 4\r\n\r\noops")
    assert text.error == "HTTP 500: oops"
    assert parse(b"HTTP/1.1 502 Bad Gateway\r\n\r\n", closed=True).error == "HTTP 502"
    assert "not an HTTP reply" in (parse(b"SSH-2.0\r\n").error or "")


def test_what_is_no_chunk_is_a_failure() -> None:
    assert "not a completion chunk" in (reply(token("a"), "{not json", token("b")).error or "")


def test_a_server_that_does_not_stream() -> None:
    body = {"choices": [{"message": {"content": "hello"}, "finish_reason": "stop"}], "usage": usage_of(4)}
    record = parse(*whole("200 OK", body), text=True)
    assert record.ok
    assert record.deltas == [(1.0, 4)]
    assert record.text == "hello"
    assert record.tpot is None
