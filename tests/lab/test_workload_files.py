import json
from pathlib import Path

import pytest

from paceline.checkpoint.tokenizer import Tokenizer
from paceline.lab.workload.files import chat_file, text_file
from paceline.lab.workload.invalid import InvalidWorkload
from paceline.lab.workload.lengths import fixed, uniform
from tiny_vocabularies import byte_level

TOKENIZER = Tokenizer(byte_level())


@pytest.fixture
def book(tmp_path: Path) -> Path:
    file = tmp_path / "book.txt"
    file.write_text(" ".join(f"word{index}" for index in range(100)) + "\n")
    return file


def test_text_by_words(book: Path) -> None:
    drafts = text_file(book, 10, uniform(5, 10), fixed(7), seed=1)
    words = [str(draft.prompt).split() for draft in drafts]
    assert all(5 <= len(prompt) <= 10 for prompt in words)
    told = [int(word.removeprefix("word")) for prompt in words for word in prompt]
    assert told == list(range(told[0], told[0] + len(told)))  # one after the other
    assert all((draft.output_tokens, draft.prompt_tokens) == (7, None) for draft in drafts)
    starts = {str(text_file(book, 10, fixed(5), fixed(7), run=run)[0].prompt) for run in range(8)}
    assert len(starts) > 4


def test_text_by_tokens(book: Path) -> None:
    whole = TOKENIZER.encode(book.read_text(), add_special_tokens=False)
    n = len(whole) // 20
    drafts = text_file(book, n, fixed(20), fixed(7), tokenizer=TOKENIZER, form="ids")
    told = [token for draft in drafts for token in draft.prompt]
    assert len(told) == n * 20
    assert str(told)[1:-1] in str(whole)
    assert all(draft.prompt_tokens == 20 for draft in drafts)
    texts = text_file(book, n, fixed(20), fixed(7), tokenizer=TOKENIZER, form="text")
    chats = text_file(book, n, fixed(20), fixed(7), tokenizer=TOKENIZER, form="chat")
    assert "".join(str(draft.prompt) for draft in texts) == TOKENIZER.decode(told)
    assert [draft.prompt for draft in chats] == [[{"role": "user", "content": draft.prompt}] for draft in texts]


def test_text_of_exactly_the_length(book: Path) -> None:
    (draft,) = text_file(book, 1, fixed(100), fixed(7))
    assert draft.prompt == book.read_text().strip()


def test_text_that_is_too_short(book: Path) -> None:
    with pytest.raises(InvalidWorkload, match=r"book\.txt: has 100 words, but 3 prompts need 150"):
        text_file(book, 3, fixed(50), fixed(1))
    with pytest.raises(InvalidWorkload, match=r"No such file"):
        text_file(book.with_name("nowhere"), 3, fixed(50), fixed(1))


SAID = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hello world"},
    {"role": "user", "content": [{"type": "text", "text": "the dog?"}], "name": "ann"},
    {"role": "assistant", "content": [{"type": "text", "text": "lazy dog"}]},
]
SHARED = {"id": "x", "conversations": [{"from": "human", "value": "quick?"}, {"from": "gpt", "value": "brown fox"}]}
SILENT = {"conversations": [{"from": "gpt", "value": "hello"}]}


def test_chats_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    # A line separator that is no line end in JSON, and entries that ask nothing.
    lines = [{"messages": SAID}, SILENT, {"messages": []}, {"messages": [{"role": "user", "content": "a\u2028b"}]}]
    file.write_text("\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines))
    drafts = chat_file(file, output_tokens=9)
    assert [draft.prompt for draft in drafts] == [SAID[:4], [{"role": "user", "content": "a\u2028b"}]]
    assert all((draft.output_tokens, draft.prompt_tokens, draft.after) == (9, None, None) for draft in drafts)
    assert [draft.prompt for draft in chat_file(file, 1, output_tokens=9, turns="first")] == [SAID[:2]]
    with pytest.raises(InvalidWorkload, match="has 2 conversations, but 3 are asked for"):
        chat_file(file, 3, output_tokens=9)


def test_sharegpt_list_with_recorded_lengths(tmp_path: Path) -> None:
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps([SHARED, {"messages": SAID}], indent=2))
    drafts = chat_file(file, tokenizer=TOKENIZER, turns="all")
    assert [draft.prompt for draft in drafts] == [[{"role": "user", "content": "quick?"}], SAID[:2], SAID[:4]]
    assert [draft.after for draft in drafts] == [None, None, 1]
    assert not any(draft.needs for draft in drafts)
    replies = [TOKENIZER.encode(text, add_special_tokens=False) for text in ("brown fox", "hello world", "lazy dog")]
    assert [draft.output_tokens for draft in drafts] == [len(reply) for reply in replies]


def test_messages_in_a_row_are_one_turn(tmp_path: Path) -> None:
    file = tmp_path / "chat"
    said = [{"role": "user", "content": text} for text in ("a", "b")] + [{"role": "assistant", "content": "c"}]
    file.write_text(json.dumps({"messages": said}))
    assert [draft.prompt for draft in chat_file(file, output_tokens=4, turns="all")] == [said[:2]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"messages": [{"role": "user", "content": "a"}]}\n{"messages": [', ":2: no JSON: "),
        ('\n{"prompt": "a"}', ":2: needs a list named messages or conversations"),
        ('{"messages": [{"role": "wizard", "content": "a"}]}', ":1: message 0 needs content, and role as one of "),
        ('{"conversations": [{"from": "human"}]}', ":1: message 0 needs value, and from as one of "),
        ('[{"messages": []},\n 7]', ": entry 1: needs a list named messages"),
        ("[\n{]", ":2: no JSON: "),
        ("", ": holds no conversations"),
    ],
)
def test_errors_name_file_and_place(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "chat"
    file.write_text(text)
    with pytest.raises(InvalidWorkload) as caught:
        chat_file(file, output_tokens=4)
    assert str(caught.value).startswith(f"{file}{message}")


def test_lengths_of_replies_that_nobody_recorded(tmp_path: Path) -> None:
    file = tmp_path / "chat"
    file.write_text('{"messages": [{"role": "user", "content": "a"}]}')
    with pytest.raises(InvalidWorkload, match=r"^output: is needed without a tokenizer"):
        chat_file(file)
    with pytest.raises(InvalidWorkload, match=r"chat:1: message 0 has no recorded reply"):
        chat_file(file, tokenizer=TOKENIZER)
