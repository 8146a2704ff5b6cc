"""Against a plain Python BPE over the ``regex`` module, transformers, and SentencePiece's own output."""

import json
import random
from collections.abc import Callable, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from paceline.checkpoint.error import CheckpointError
from paceline.checkpoint.gguf import GGUFCheckpoint
from paceline.checkpoint.gguf_tokenizer import gguf_tokenizer
from paceline.checkpoint.source import locate
from paceline.checkpoint.tokenizer import Tokenizer

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (  # llama3/tokenizer.py, as published by Meta
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")

ALPHABETS = [
    "abcdefghij ABC",
    "0123456789 .,-x",
    " \t\n\r\u00a0\u3000ab",
    "éàßñ Ωжש ab1",
    "漢字仮名交じり文12",
    "🙂👩‍👩‍👧🇩🇪 é",
    "١٢٣४५Ⅷ½² 7a",
    "(){}[]=+-*/_<>!:;'\"#\n    ",
    "'s't're'LL'D don",
    "<|im_start|>user\n",
]
WORDS = ["the", "quick", "brown", "def", "return", "self.value", "==", "12345", "3.14159", "it's", "I'LL", "don't"]
WORDS += ["été", "Straße", "漢字", "🙂", "\n\n", "\t", "...", ""]


def random_texts(count: int) -> list[str]:
    draw = random.Random(7)
    texts = ["".join(draw.choices(draw.choice(ALPHABETS), k=draw.randint(1, 40))) for _ in range(count)]
    texts += ["".join(draw.choices("".join(ALPHABETS), k=draw.randint(1, 60))) for _ in range(count)]
    texts += [draw.choice(" \n").join(draw.choices(WORDS, k=draw.randint(1, 12))) for _ in range(count)]
    return texts


def gpt2_pieces(text: str) -> list[str]:
    return regex.findall(GPT2, text)


def smollm_pieces(text: str) -> list[str]:
    """Each digit alone, then GPT-2's split of what lies between."""
    return [piece for part in regex.split(r"(\p{N})", text) if part for piece in regex.findall(GPT2, part)]


def llama3_pieces(text: str) -> list[str]:
    return regex.findall(LLAMA3, text)


def qwen2_pieces(text: str) -> list[str]:
    return regex.findall(QWEN2, text)


@cache
def byte_letters() -> dict[int, str]:
    """GPT-2's printable stand-ins for bytes."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + index) for index, byte in enumerate(others)}


class ReferenceBPE:
    def __init__(self, metadata: Mapping[str, Any], pieces: Callable[[str], list[str]], whole_pieces: bool) -> None:
        self.tokens = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
        self.ranks = {tuple(pair.split(" ")): rank for rank, pair in enumerate(metadata["tokenizer.ggml.merges"])}
        types = metadata["tokenizer.ggml.token_type"]
        special = [token for token, kind in zip(self.tokens, types, strict=True) if kind == 3]
        self.special = regex.compile("(" + "|".join(map(regex.escape, special)) + ")")
        self.pieces = pieces
        self.whole_pieces = whole_pieces

    def encode(self, text: str) -> list[int]:
        ids = []
        for index, part in enumerate(self.special.split(text)):
            if index % 2:
                ids.append(self.tokens[part])
                continue
            for piece in self.pieces(part):
                letters = "".join(byte_letters()[byte] for byte in piece.encode())
                whole = self.whole_pieces and letters in self.tokens
                ids += [self.tokens[token] for token in ([letters] if whole else self.merged(letters))]
        return ids

    def merged(self, letters: str) -> list[str]:
        parts = list(letters)
        while len(parts) > 1:
            ranked = [(self.ranks.get(pair, 10**9), at) for at, pair in enumerate(pairwise(parts))]
            rank, at = min(ranked)
            if rank == 10**9:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return parts


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", smollm_pieces),
        ("gpt-2", gpt2_pieces),
        ("default", gpt2_pieces),
        ("llama-bpe", llama3_pieces),
        ("qwen2", qwen2_pieces),
    ],
)
def test_byte_level_bpe(smollm2: GGUFCheckpoint, pre: str, pieces: Callable[[str], list[str]]) -> None:
    metadata = {**smollm2.metadata, "tokenizer.ggml.pre": pre}
    tokenizer = gguf_tokenizer(metadata)
    reference = ReferenceBPE(metadata, pieces, whole_pieces=pre == "llama-bpe")
    for text in random_texts(150):
        if pre == "qwen2":
            text = regex.sub(r"\p{M}", "", text)  # Qwen composes them first
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == reference.encode(text), text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_smollm2_equals_transformers_between_digits(smollm2: GGUFCheckpoint) -> None:
    """Transformers reads the same file but knows no pre-tokenizers of GGUF, so the texts have no digits in a row."""
    path = locate("smollm2")
    reference = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    tokenizer = smollm2.tokenizer()
    for text in random_texts(150):
        text = regex.sub(r"\s*\p{N}", "", text)
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text, add_special_tokens=False), text
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)


def test_smollm2_special_tokens(smollm2: GGUFCheckpoint) -> None:
    tokenizer = smollm2.tokenizer()
    assert tokenizer.encode("<|im_start|>user\n2024<|im_end|>") == [1, 4093, 198, 34, 32, 34, 36, 2]
    assert (tokenizer.bos_token, tokenizer.bos_id) == ("<|im_start|>", 1)
    assert (tokenizer.eos_token, tokenizer.eos_id) == ("<|im_end|>", 2)
    assert tokenizer.vocab_size == 49152
    assert tokenizer.adds_bos is False
    assert tokenizer.decode([1, 4093, 198]) == "user\n"


@pytest.fixture(scope="module")
def shared_tokenizer(smollm2: GGUFCheckpoint) -> Tokenizer:
    return smollm2.tokenizer()


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_text_survives(shared_tokenizer: Tokenizer, text: str) -> None:
    """But for the bytes that the published vocabulary lacks, such as most control characters: those vanish."""
    known = shared_tokenizer.backend.get_vocab()
    text = "".join(letter for letter in text if all(byte_letters()[byte] in known for byte in letter.encode()))
    assert shared_tokenizer.decode(shared_tokenizer.encode(text), skip_special_tokens=False) == text


def sentencepiece(**overrides: Any) -> tuple[dict[str, Any], list[tuple[str, list[int]]]]:
    """A small SentencePiece BPE model, and texts with the ids that the sentencepiece library gives them."""
    content = json.loads((Path(__file__).parent / "sentencepiece_reference.json").read_text(encoding="utf-8"))
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": content["tokens"],
        "tokenizer.ggml.scores": content["scores"],
        "tokenizer.ggml.token_type": content["types"],
        "tokenizer.ggml.bos_token_id": content["bos"],
        "tokenizer.ggml.eos_token_id": content["eos"],
        "tokenizer.ggml.unknown_token_id": content["unk"],
    }
    return {**metadata, **overrides}, content["cases"]


def test_sentencepiece_bpe() -> None:
    metadata, cases = sentencepiece()
    tokenizer = gguf_tokenizer(metadata)
    assert tokenizer.adds_bos
    for text, ids in cases:
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.encode(text) == [tokenizer.bos_id, *ids]
        assert tokenizer.decode(ids) == text


def test_sentencepiece_without_space_prefix() -> None:
    metadata, cases = sentencepiece(**{"tokenizer.ggml.add_space_prefix": False})
    tokenizer = gguf_tokenizer(metadata)
    for text, ids in cases:
        plain = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(plain) == text
        assert tokenizer.encode(" " + text, add_special_tokens=False) == ids, text


def test_token_types(smollm2: GGUFCheckpoint) -> None:
    """User-defined tokens are matched in text and stay when special ones are skipped; unused ones are never matched."""
    tokens = [*smollm2.metadata["tokenizer.ggml.tokens"], "<tool>", "<pad0>"]
    types = [*smollm2.metadata["tokenizer.ggml.token_type"], 4, 5]
    changed = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    tokenizer = gguf_tokenizer({**smollm2.metadata, **changed})
    ids = tokenizer.encode("a<tool><|im_end|><pad0>")
    assert ids[1:3] == [49152, 2]
    assert 49153 not in ids
    assert tokenizer.decode(ids) == "a<tool><pad0>"
    assert tokenizer.vocab_size == 49153


@pytest.mark.parametrize(
    ("pre", "stated", "expected"),
    [("smollm", None, False), ("smollm", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_bos(smollm2: GGUFCheckpoint, pre: str, stated: bool | None, expected: bool) -> None:
    metadata = {key: value for key, value in smollm2.metadata.items() if key != "tokenizer.ggml.add_bos_token"}
    metadata["tokenizer.ggml.pre"] = pre
    if stated is not None:
        metadata["tokenizer.ggml.add_bos_token"] = stated
    tokenizer = gguf_tokenizer(metadata)
    assert tokenizer.adds_bos is expected
    assert tokenizer.encode("hello") == ([1] if expected else []) + tokenizer.encode("hello", add_special_tokens=False)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokenizer.ggml.pre": "tekken"}, "pre-tokenizer 'tekken' is not supported; these are: default, gpt-2"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer model 'bert' is not supported"),
        ({"tokenizer.ggml.tokens": []}, "has no tokenizer"),
        ({"tokenizer.ggml.model": "llama"}, "needs a score for each token"),
    ],
)
def test_what_is_not_supported(smollm2: GGUFCheckpoint, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        gguf_tokenizer({**smollm2.metadata, **changed})
