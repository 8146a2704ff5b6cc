"""Text to token ids and back."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers

from paceline.checkpoint.error import CheckpointError
from paceline.checkpoint.json_file import read_json
from paceline.engine.invalid import InvalidRequest


class Tokenizer:
    """A ``tokenizers`` backend and the special tokens that the checkpoint names.

    Text that spells a special token (``<|im_end|>``) becomes that token's id, in prompts and in chat messages alike,
    as everywhere in the field: whoever puts text of strangers into a prompt must clean it first.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, *, bos_token: str | None = None, eos_token: str | None = None
    ) -> None:
        backend.no_truncation()  # files may carry the settings of training runs
        backend.no_padding()
        self.backend = backend
        self.bos_token = bos_token
        self.eos_token = eos_token

    @property
    def bos_id(self) -> int | None:
        return None if self.bos_token is None else self.backend.token_to_id(self.bos_token)

    @property
    def eos_id(self) -> int | None:
        return None if self.eos_token is None else self.backend.token_to_id(self.eos_token)

    @cached_property
    def vocab_size(self) -> int:
        """Highest id + 1; the model's embedding may have more rows."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def adds_bos(self) -> bool:
        """Whether encoding with special tokens puts the BOS in front."""
        if self.bos_id is None:
            return False
        with_special, without = (self.backend.encode("a", add_special_tokens=add).ids for add in (True, False))
        return with_special[:1] == [self.bos_id] and without[:1] != [self.bos_id]

    def encode(self, text: str, add_special_tokens: bool = True, *, field: str = "prompt") -> list[int]:
        """Token ids of a text.

        Args:
            add_special_tokens: add what the tokenizer adds to every text, such as a BOS. A BOS that the text itself
                starts with is not doubled.
            field: name of the request's field, for errors.

        Raises:
            InvalidRequest: the text holds half a surrogate pair, which is no Unicode text.
        """
        try:
            text.encode()  # the library's own error is a TypeError that does not say where
            # Only the batch calls let other threads run meanwhile; a long text would stop the server's event loop.
            ids: list[int] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except UnicodeEncodeError as error:
            raise InvalidRequest(field, f"is not valid Unicode at character {error.start}") from error
        if add_special_tokens and self.adds_bos and ids[1:2] == [self.bos_id]:
            del ids[0]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids. Ids outside the vocabulary give no text; broken UTF-8 gives U+FFFD."""
        text: str = self.backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]
        return text

    def token(self, token_id: int) -> str:
        """The token as the vocabulary spells it; empty for an id outside the vocabulary."""
        return self.backend.id_to_token(token_id) or ""


def folder_tokenizer(folder: Path) -> Tokenizer:
    """Reads ``tokenizer.json``; ``tokenizer_config.json`` only names the special tokens.

    What is added around a text is up to ``tokenizer.json``: transformers ignores ``add_bos_token`` beside it, too.

    Raises:
        CheckpointError: no readable ``tokenizer.json``.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(
            f"{folder} has no tokenizer.json. Make one with transformers: "
            f"AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    special = special_tokens(folder)
    return Tokenizer(backend, bos_token=special.get("bos_token"), eos_token=special.get("eos_token"))


def special_tokens(folder: Path) -> dict[str, str]:
    """Name (``bos_token``, ``pad_token``, ...) -> token. Files state a string, an object with ``content``, or null."""
    stated = read_json(folder / "special_tokens_map.json") | read_json(folder / "tokenizer_config.json")
    tokens = {}
    for name, value in stated.items():
        token = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(token, str):
            tokens[name] = token
    return tokens
