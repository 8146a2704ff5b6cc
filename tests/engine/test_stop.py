"""Against a reader that takes the text one character at a time."""

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.stop import StopStrings

LETTERS = st.text(alphabet="ab\n", min_size=1, max_size=5)
STOPS = st.lists(LETTERS, min_size=1, max_size=4).map(tuple)


def pieces_of(text: str, sizes: list[int]) -> list[str]:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(text[start : start + size])
        start += size
    return [*pieces, text[start:]]


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return end, max(ended, key=len)
    return None


@settings(max_examples=500)
@given(st.text(alphabet="ab\n", max_size=25), STOPS, st.lists(st.integers(0, 4)), st.booleans())
def test_any_split_stops_where_a_reader_of_characters_would(
    text: str, stops: tuple[str, ...], sizes: list[int], include: bool
) -> None:
    """failure 7, failure 8. Nothing of the stop string is given out; all that cannot become one is."""
    watch = StopStrings(stops, include)
    given_out = read = ""
    expected = first_stop(text, stops)
    for piece in pieces_of(text, sizes):
        read += piece
        certain, stop = watch.push(piece)
        given_out += certain
        if stop is not None:
            assert expected is not None
            end, expected_stop = expected
            assert stop == expected_stop
            assert given_out == text[: end if include else end - len(stop)]
            return
        assert given_out + watch.held == read
        beginnings = [read[i:] for i in range(len(read)) if any(s.startswith(read[i:]) for s in stops)]
        assert watch.held == max(beginnings, key=len, default="")
    assert expected is None
    assert given_out + watch.flush() == text


def test_held_text_is_given_out_when_it_becomes_no_stop() -> None:
    """failure 7."""
    watch = StopStrings(("efghijk",))
    assert [watch.push(piece) for piece in ("abcd ef", "ghi", "jz")] == [
        ("abcd ", None),
        ("", None),
        ("efghijz", None),
    ]


def test_of_several_the_first_to_end_wins_then_the_longest() -> None:
    assert StopStrings(("abcd", "bc")).push("xabcd") == ("xa", "bc")
    assert StopStrings(("c", "bc", "abc")).push("xabc") == ("x", "abc")
    watch = StopStrings(("abcd", "bc"))
    assert [watch.push(char) for char in "xabc"] == [("x", None), ("", None), ("", None), ("a", "bc")]


def test_passed_over_stop_is_text() -> None:
    watch = StopStrings(("stop", "to"))
    assert watch.push("a stop", may_stop=False) == ("a stop", None)
    assert watch.push(" sto", may_stop=False) == (" ", None), "the longer one may still come"
    assert watch.push("p!") == ("", "stop"), "ends inside this piece, so it counts, and the older 'to' does not"
    overlapping = StopStrings(("aa",))
    assert overlapping.push("aa", may_stop=False) == ("a", None)
    assert overlapping.push("a") == ("", "aa"), "the second and the third a"
