"""Against tokenizers' own whole-text decoding, and against bytes for what that cannot say."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from paceline.engine.detokenizer import REPLACEMENT, Detokenizer, begins_text, token_bytes
from tiny_vocabularies import Vocabulary, byte_fallback, byte_fallback_unstripped, byte_level, metaspace

VOCABULARIES = [byte_level, byte_fallback, byte_fallback_unstripped, metaspace]
every_vocabulary = pytest.mark.parametrize("vocabulary", VOCABULARIES, ids=lambda make: make.__name__)
TEXT = st.text(alphabet="he lo,wrd\nüéß中文日本ไท😀👩\u200d👧 ", max_size=40)


def deltas(tokenizer: Tokenizer, output: list[int], prompt: list[int] | None = None, skip: bool = True) -> list[str]:
    """One delta a token, and the flush."""
    table = token_bytes(tokenizer, skip)
    detokenizer = Detokenizer(table, begins_text(table, prompt or []))
    return [*map(detokenizer.push, output), detokenizer.flush()]


def byte_tokens(tokenizer: Tokenizer, char: str) -> list[int]:
    """One token per byte of ``char``."""
    if tokenizer.token_to_id("<0x00>") is not None:
        return [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in char.encode()]
    names = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(char)[0][0]
    return [tokenizer.token_to_id(name) for name in names]


def bytes_of(tokenizer: Tokenizer, ids: list[int]) -> bytes:
    """A SentencePiece vocabulary's bytes, spelled out from its token names; special tokens skipped."""
    data = b""
    for token in ids:
        name = tokenizer.id_to_token(token) or ""
        if name.startswith("<0x"):
            data += bytes([int(name[3:5], 16)])
        elif not name.startswith("<"):
            data += name.replace("▁", " ").encode()
    return data


@settings(max_examples=300)
@given(st.lists(st.integers(0, 450), max_size=40), st.booleans())
def test_random_ids_decode_like_the_whole_on_a_byte_level_vocabulary(ids: list[int], skip: bool) -> None:
    """failure 2. Invalid UTF-8 and ids without a token included."""
    tokenizer = byte_level()
    assert "".join(deltas(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=300)
@given(st.lists(st.integers(3, 310), max_size=40))
def test_random_ids_decode_as_bytes_on_a_byte_fallback_vocabulary(ids: list[int]) -> None:
    """failure 2. tokenizers gives up whole runs of byte tokens here, so the reference is Python's own UTF-8."""
    tokenizer = byte_fallback_unstripped()
    assert "".join(deltas(tokenizer, ids)) == bytes_of(tokenizer, ids).decode("utf-8", "replace")


@every_vocabulary
def test_no_id_raises(vocabulary: Vocabulary) -> None:
    """failure 2, failure 29. Ids that no tokenizer can look up, and rows of a padded embedding, show nothing."""
    assert "".join(deltas(vocabulary(), [-1, 10**6, 2**31, 2**32, 2**62, -(2**40)])) == ""
    hello = vocabulary().encode("hello").ids
    assert "".join(deltas(vocabulary(), [2**62, *hello, 10**6])) == "hello"


@every_vocabulary
@given(text=TEXT, cut=st.integers(0, 40))
def test_output_continues_the_prompt_as_the_whole_decodes(vocabulary: Vocabulary, text: str, cut: int) -> None:
    """failure 4. Whatever part of a text is the prompt; the leading space of the first output token included."""
    tokenizer = vocabulary()
    ids = tokenizer.encode(text).ids
    prompt, output = ids[:cut], ids[cut:]
    before, whole = tokenizer.decode(prompt), tokenizer.decode(ids)
    if REPLACEMENT in before:
        return  # The cut broke a character; see the tests of broken tails.
    pieces = deltas(tokenizer, output, prompt)
    assert before + "".join(pieces) == whole
    assert not any(REPLACEMENT in piece for piece in pieces)


@every_vocabulary
@given(text=TEXT)
def test_special_tokens_between_words(vocabulary: Vocabulary, text: str) -> None:
    tokenizer = vocabulary()
    ids = tokenizer.encode(f"<s>{text}</s><s>{text}").ids
    for skip in (True, False):
        assert "".join(deltas(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_leading_space() -> None:
    tokenizer = byte_fallback()
    bos, world, space = (tokenizer.token_to_id(name) for name in ("<s>", "▁world", "▁"))
    hello = tokenizer.encode("hello").ids
    assert deltas(tokenizer, [world], prompt=hello) == [" world", ""]
    assert deltas(tokenizer, [world, world], prompt=[bos]) == ["world", " world", ""]
    assert deltas(tokenizer, [world], prompt=[bos], skip=False) == [" world", ""], "a visible <s> begins the text"
    assert deltas(tokenizer, [bos, world, world]) == ["", "world", " world", ""], "skipped tokens do not begin it"
    assert deltas(tokenizer, [space, world]) == ["", " world", ""], "only one space is stripped"
    assert deltas(byte_fallback_unstripped(), [world]) == [" world", ""]


@pytest.mark.parametrize("vocabulary", [byte_level, byte_fallback], ids=lambda make: make.__name__)
@pytest.mark.parametrize("kept", [1, 2, 3])
def test_prompt_ends_inside_a_character(vocabulary: Vocabulary, kept: int) -> None:
    """failure 1. The output never repeats the prompt, and its own text is whole."""
    tokenizer = vocabulary()
    emoji = byte_tokens(tokenizer, "🦊")
    prompt = tokenizer.encode("the secret").ids + emoji[:kept]
    hello = tokenizer.encode("hello").ids
    assert "".join(deltas(tokenizer, hello, prompt)).strip() == "hello"
    rest = "".join(deltas(tokenizer, emoji[kept:] + hello, prompt))
    assert rest.replace(" ", "") == REPLACEMENT * (4 - kept) + "hello"


@pytest.mark.parametrize("vocabulary", [byte_level, byte_fallback], ids=lambda make: make.__name__)
def test_character_of_several_tokens_is_held_until_complete(vocabulary: Vocabulary) -> None:
    """failure 4."""
    tokenizer = vocabulary()
    ids = byte_tokens(tokenizer, "🦊")
    begun = tokenizer.encode("hello").ids
    assert deltas(tokenizer, ids, begun) == ["", "", "", "🦊", ""]
    assert deltas(tokenizer, ids[:3], begun) == ["", "", "", REPLACEMENT], "cut at the end: one U+FFFD, at the end"
    assert deltas(tokenizer, ids[:1], begun) == ["", REPLACEMENT]
    assert deltas(tokenizer, ids[:2] + begun, begun)[:3][-1].startswith(REPLACEMENT), "resynchronised at the next one"


def test_the_replacement_character_itself_can_be_written() -> None:
    tokenizer = byte_level()
    assert "".join(deltas(tokenizer, tokenizer.encode(f"a{REPLACEMENT}b").ids)) == f"a{REPLACEMENT}b"


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    from paceline.checkpoint.checkpoint import open_checkpoint
    from paceline.checkpoint.source import locate

    return open_checkpoint(locate("smollm2")).tokenizer().backend


def test_real_vocabulary_random_ids(smollm2: Tokenizer) -> None:
    """failure 2. SmolLM2: every id once, then random ones of all ids and of the byte-like ones."""
    draw = random.Random(0)
    size = smollm2.get_vocab_size()
    fragments = [token for token in range(size) if REPLACEMENT in smollm2.decode([token])]
    assert len(fragments) > 100
    sequences = [list(range(size))]
    sequences += [[draw.randrange(size) for _ in range(50)] for _ in range(300)]
    sequences += [[draw.choice(fragments) for _ in range(50)] for _ in range(300)]
    for ids in sequences:
        assert "".join(deltas(smollm2, ids)) == smollm2.decode(ids)


def test_real_vocabulary_text(smollm2: Tokenizer) -> None:
    """failure 4. Characters of many scripts arrive whole."""
    text = "größer 中文字符, 日本語の文 ภาษาไทย हिन्दी עברית 🦊👩‍👩‍👧‍👦🏳️‍🌈 = 𝒳² + ½\n\n\tend"
    ids = smollm2.encode(text, add_special_tokens=False).ids
    pieces = deltas(smollm2, ids)
    assert "".join(pieces) == text
    assert not any(REPLACEMENT in piece for piece in pieces)
