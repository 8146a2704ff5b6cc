"""Log-probabilities in OpenAI's two shapes, and prompt_logprobs in vLLM's."""

from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Tokenizer

from paceline.engine.detokenizer import token_bytes
from paceline.engine.step import TokenLogprobs

LOWEST = -9999.0
"""What stands for minus infinity, which JSON does not have."""

_utf8 = getincrementaldecoder("utf-8")


def finite(logprob: float) -> float:
    # NaN compares false as well.
    return logprob if logprob > LOWEST else LOWEST


class TokenTexts:
    """How single tokens are shown: as text, with U+FFFD for part of a character, and as bytes."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self._table = token_bytes(backend, False)

    def text(self, token: int) -> str:
        return self._table[token].decode("utf-8", "replace")

    def name(self, token: int) -> str:
        """As OpenAI's completions show it: part of a character as ``bytes:\\xe4\\xb8``, so that no two look alike."""
        data = self._table[token]
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def data(self, token: int) -> bytes:
        return self._table[token]

    def special(self, token: int) -> bool:
        return self._table.shows(token) and not token_bytes(self._backend, True).shows(token)

    def shown(self, token: int, skip_special_tokens: bool) -> bytes:
        """What the token adds to the reply's text."""
        return token_bytes(self._backend, skip_special_tokens)[token]


class TextOffsets:
    """Where each token's text starts, in characters of the reply so far."""

    def __init__(self, texts: TokenTexts, skip_special_tokens: bool) -> None:
        self._texts = texts
        self._skip = skip_special_tokens
        self._decoder = _utf8("replace")
        self._at = 0

    def next(self, token: int) -> int:
        at = self._at
        self._at += len(self._decoder.decode(self._texts.shown(token, self._skip)))
        return at

    def next_of_text(self, token: int, text: str) -> int:
        """Of a token of a prompt that came as ``text``: special tokens take room where the text spells them, and none
        where the tokenizer added them."""
        at = self._at
        if not self._texts.special(token):
            self._at += len(self._decoder.decode(self._texts.data(token)))
        elif text.startswith(spelt := self._texts.text(token), at):
            self._at += len(spelt)
        return at

    def jump(self, offset: int) -> None:
        """The prompt's text ends here."""
        self._decoder.reset()
        self._at = offset


def completion_logprobs(
    ids: Sequence[int],
    entries: Sequence[TokenLogprobs | None],
    k: int,
    texts: TokenTexts,
    next_offset: Callable[[int], int],
) -> dict[str, list[Any]]:
    """The completions shape. An entry of None is the first token of an echoed prompt, which nothing predicts.

    ``top_logprobs`` holds the ``k`` most likely tokens, and the token itself.
    """
    tops: list[dict[str, float] | None] = []
    for token, entry in zip(ids, entries, strict=True):
        if entry is None:
            tops.append(None)
            continue
        top: dict[str, float] = {}
        for other, logprob in zip(entry.top_ids[:k], entry.top_logprobs, strict=False):
            top.setdefault(texts.name(other), finite(logprob))
        top.setdefault(texts.name(token), finite(entry.logprob))
        tops.append(top)
    return {
        "tokens": [texts.name(token) for token in ids],
        "token_logprobs": [None if entry is None else finite(entry.logprob) for entry in entries],
        "top_logprobs": tops,
        "text_offset": [next_offset(token) for token in ids],
    }


def chat_logprobs(ids: Sequence[int], entries: Sequence[TokenLogprobs], k: int, texts: TokenTexts) -> dict[str, Any]:
    """The chat shape, with exactly ``k`` alternatives a token."""
    content = []
    for token, entry in zip(ids, entries, strict=True):
        tops = zip(entry.top_ids[:k], entry.top_logprobs, strict=False)
        item = _chat_token(token, entry.logprob, texts)
        item["top_logprobs"] = [_chat_token(other, logprob, texts) for other, logprob in tops]
        content.append(item)
    return {"content": content, "refusal": None}


def _chat_token(token: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    return {"token": texts.text(token), "logprob": finite(logprob), "bytes": list(texts.data(token))}


def prompt_logprobs(
    ids: Sequence[int], entries: Sequence[TokenLogprobs], k: int, texts: TokenTexts
) -> list[dict[str, dict[str, Any]] | None]:
    """One entry a prompt token: token id -> logprob, rank and text, for the token and the ``k`` most likely ones.
    The first is null: nothing predicts it."""
    result: list[dict[str, dict[str, Any]] | None] = [None]
    for token, entry in zip(ids[1:], entries, strict=True):
        ranked = enumerate(zip(entry.top_ids[:k], entry.top_logprobs, strict=False), 1)
        shown = {other: (logprob, rank) for rank, (other, logprob) in ranked}
        shown[token] = (entry.logprob, entry.rank)
        result.append(
            {
                str(other): {"logprob": finite(logprob), "rank": rank, "decoded_token": texts.text(other)}
                for other, (logprob, rank) in shown.items()
            }
        )
    return result
