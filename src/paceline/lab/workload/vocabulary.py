"""What random prompts are made of."""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoint.checkpoint import open_checkpoint
from paceline.checkpoint.error import CheckpointError
from paceline.checkpoint.source import ALIASES, locate
from paceline.checkpoint.tokenizer import Tokenizer, folder_tokenizer
from paceline.lab.stage import Prompt
from paceline.lab.workload.invalid import InvalidWorkload

Form = Literal["ids", "text", "chat"]
"""Token ids or text for ``/v1/completions``; one user's message for ``/v1/chat/completions``."""

COMMON_IDS = range(1000, 31000)
"""Ordinary tokens in nearly every vocabulary of a language model: special tokens sit below or above."""

_WORDS = (
    "the of and to in is that it was for on are as with his they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some so these "
    "would other into has more her two like him see time could no make than first been its who now people my made over "
    "did down only way find use may water long little very after words called just where most know get through back "
    "much before go good new write our used me man too any day same right look think also around another came come "
    "work three word must because does part even place well such here take why things help put years different away"
)
COMMON_WORDS = _WORDS.split()
"""Each of them is one token, with the space before it, in most vocabularies."""


class Vocabulary:
    """Ids or words to draw from; a drawn index means the same piece in every prompt, so equal draws are equal prefixes.

    Args:
        pieces: token ids, or words without spaces.
        form: of the prompts; ``ids`` takes ids, the others take words.
    """

    def __init__(self, pieces: Sequence[int] | Sequence[str], form: Form) -> None:
        assert pieces, "a vocabulary holds something"
        assert all(isinstance(piece, int) == (form == "ids") for piece in (pieces[0], pieces[-1]))
        # Of objects: a prompt refers to these ids and has none of its own, which is a quarter of the memory.
        self._pieces: NDArray[Any] = np.array(pieces, dtype=object)
        self.form = form

    def __len__(self) -> int:
        return len(self._pieces)

    def draw(self, n: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Indices of ``n`` pieces, int64 [n]."""
        return rng.integers(len(self), size=n)

    def prompt(self, draws: NDArray[Any]) -> Prompt:
        """The drawn pieces as a prompt."""
        pieces = self._pieces[draws].tolist()
        return pieces if self.form == "ids" else in_form(" ".join(pieces), self.form)

    def tokens(self, n: int) -> int | None:
        """How many tokens the model sees of ``n`` pieces: known for ids alone."""
        return n if self.form == "ids" else None


def in_form(text: str, form: Form) -> Prompt:
    """A text as a prompt of a form that is not ``ids``."""
    return [{"role": "user", "content": text}] if form == "chat" else text


def ordinary_ids(tokenizer: Tokenizer) -> list[int]:
    """Ids of the vocabulary, rising, without those of special and added tokens and without gaps in the numbering."""
    added = set(tokenizer.backend.get_added_tokens_decoder())
    return sorted(set(tokenizer.backend.get_vocab(with_added_tokens=True).values()) - added)


def single_token_words(tokenizer: Tokenizer) -> list[str]:
    """Lower-case words that are one token each when a space is before them; in order of their ids.

    A prompt of n of them has n tokens, give or take its first word and what the server adds.
    """
    words = []
    for id in ordinary_ids(tokenizer):
        spelled = re.fullmatch("[Ġ▁]([a-z]{2,})", tokenizer.token(id))
        if spelled:
            words.append((id, spelled[1]))
    first, *encoded = tokenizer.backend.encode_batch_fast(
        ["a", *(f"a {word}" for _, word in words)], add_special_tokens=False
    )
    kept = [word for (id, word), coded in zip(words, encoded, strict=True) if coded.ids == [*first.ids, id]]
    if not kept:
        raise InvalidWorkload("tokenizer: has no words that are one token; leave it out to use common words")
    return kept


@cache
def read_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a folder with a ``tokenizer.json``, of a ``.gguf`` file, or of an alias (``smollm2``).

    Raises:
        InvalidWorkload: there is none. Nothing is downloaded: a hub id would bring the weights along.
    """
    path = Path(name).expanduser()
    try:
        if (path / "tokenizer.json").is_file():
            return folder_tokenizer(path)
        if path.exists() or name in ALIASES:
            return open_checkpoint(locate(name)).tokenizer()
    except CheckpointError as error:
        raise InvalidWorkload(f"tokenizer: {error}") from error
    raise InvalidWorkload(
        f"tokenizer: no {name!r} on this machine; give a folder with tokenizer.json, a .gguf file or one of the "
        f"aliases {', '.join(ALIASES)}"
    )
