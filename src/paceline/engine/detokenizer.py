"""Token ids to text, one token at a time.

Every decoder that generative vocabularies use (byte-level; metaspace with byte fallback) turns a token into the same
bytes wherever it stands, except that some strip a space at the very start of the text. So a table from id to bytes and
an incremental UTF-8 decoder give the text of any id sequence, and hold back at most 3 bytes of an unfinished character.

The joined text equals ``tokenizers.Tokenizer.decode`` of prompt and output, less the prompt's text, except that:

- A character that the prompt leaves unfinished is not completed by the output; its bytes become U+FFFD on either side.
- In invalid UTF-8, every longest part that could have begun a character becomes one U+FFFD (Unicode 15, section 3.9,
  "substitution of maximal subparts"), and what follows decodes again. Byte-level decoders do the same; the
  byte-fallback decoder of ``tokenizers`` gives up the whole run of byte tokens instead, one U+FFFD per byte.
"""

import re
from codecs import utf_8_decode
from collections.abc import Iterable
from functools import lru_cache

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: visible Latin-1 for itself, U+0100 and on for the others."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in visible)
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_LEVEL = _byte_level_alphabet()


class TokenBytes(dict[int, bytes]):
    """The bytes that each token adds to a text that has already begun; filled as ids are looked up.

    Empty for ids that show nothing: special tokens when these are skipped, and ids that the vocabulary does not have.
    """

    def __init__(self, backend: Tokenizer, skip_special_tokens: bool) -> None:
        super().__init__()
        self._backend = backend
        self._skip = skip_special_tokens
        added = backend.get_added_tokens_decoder()
        self._special = frozenset(token.content for token in added.values() if token.special)

    def __missing__(self, token: int) -> bytes:
        name = self._name(token)
        self[token] = data = b"" if name is None else self._bytes(token, name)
        return data

    def shows(self, token: int) -> bool:
        """Whether the token takes part in the text at all."""
        return self._name(token) is not None

    def at_start(self, token: int) -> bytes:
        """The bytes of a token that begins the text."""
        text = self._backend.decode([token], skip_special_tokens=self._skip) if self.shows(token) else ""
        return self[token] if REPLACEMENT in text else text.encode()

    def _name(self, token: int) -> str | None:
        name = self._backend.id_to_token(token) if 0 <= token < 2**32 else None
        return None if self._skip and name in self._special else name

    def _bytes(self, token: int, name: str) -> bytes:
        # Twice, because the second one stands inside the text.
        once = self._backend.decode([token], skip_special_tokens=self._skip)
        twice = self._backend.decode([token, token], skip_special_tokens=self._skip)
        if REPLACEMENT not in twice:
            return twice[len(once) :].encode()
        if match := BYTE_TOKEN.fullmatch(name):
            return bytes.fromhex(match[1])
        if all(char in BYTE_LEVEL for char in name):
            return bytes(BYTE_LEVEL[char] for char in name)
        return twice[len(once) :].encode()


@lru_cache(maxsize=8)
def token_bytes(backend: Tokenizer, skip_special_tokens: bool = True) -> TokenBytes:
    """The table of a tokenizer, shared by all its requests."""
    return TokenBytes(backend, skip_special_tokens)


class Detokenizer:
    """The text of one growing output. Never raises, whatever the ids.

    Args:
        table: of the tokenizer.
        begun: whether text stands before the output, so that its first token keeps its leading space.
    """

    __slots__ = ("_begun", "_pending", "_table")

    def __init__(self, table: TokenBytes, begun: bool) -> None:
        self._table = table
        self._begun = begun
        self._pending = b""

    def push(self, token: int) -> str:
        """The text that ``token`` completes; empty while a character is unfinished."""
        if self._begun:
            data = self._table[token]
        else:
            data = self._table.at_start(token)
            self._begun = self._table.shows(token)
        if self._pending:
            data = self._pending + data
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        """The end: U+FFFD when the output breaks off inside a character, else nothing."""
        text = self._pending.decode(errors="replace")
        self._pending = b""
        return text


def begins_text(table: TokenBytes, ids: Iterable[int]) -> bool:
    """Whether any of ``ids`` takes part in the text."""
    return any(map(table.shows, ids))
