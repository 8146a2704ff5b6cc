"""The tokenizer inside a GGUF file, rebuilt with the ``tokenizers`` library."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tokenizers
from gguf import TokenType
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from paceline.checkpoint.error import CheckpointError
from paceline.checkpoint.tokenizer import Tokenizer

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""The split of GPT-4's family; how many digits stay together differs."""


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(digits: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(_WORDS % digits), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _llama3() -> pre_tokenizers.PreTokenizer:
    return _split(r"\p{N}{1,3}")


def _qwen2() -> pre_tokenizers.PreTokenizer:
    return _split(r"\p{N}")


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _single_digits,
    "llama-bpe": _llama3,
    "llama3": _llama3,
    "llama-v3": _llama3,
    "qwen2": _qwen2,
    "deepseek-r1-qwen": _qwen2,
}


def gguf_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds the tokenizer from the ``tokenizer.ggml.*`` keys.

    Byte-level BPE (model ``gpt2``) with the pre-tokenizers in ``_PRE_TOKENIZERS``, and SentencePiece BPE (model
    ``llama``). Control and user-defined tokens are matched in text before anything else; unused ones never are.

    Raises:
        CheckpointError: another model or pre-tokenizer, or keys are missing.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise CheckpointError("the GGUF file has no tokenizer (tokenizer.ggml.tokens)")
    types = metadata.get("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(tokens)
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if kind == "gpt2":
        backend = _byte_level(tokens, types, metadata.get("tokenizer.ggml.merges") or [], pre)
        adds_bos = _PRE_TOKENIZERS[pre] is _llama3
    elif kind == "llama":
        scores = metadata.get("tokenizer.ggml.scores") or []
        backend = _sentence_piece(tokens, types, scores, metadata.get("tokenizer.ggml.add_space_prefix", True))
        adds_bos = True
    else:
        raise CheckpointError(f"GGUF tokenizer model {kind!r} is not supported; gpt2 and llama are")
    backend.add_tokens(
        [
            AddedToken(token, special=type_ != TokenType.USER_DEFINED, normalized=False)
            for token, type_ in zip(tokens, types, strict=True)
            if type_ in (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
        ]
    )
    special = gguf_special_tokens(metadata)
    bos, eos = special.get("bos_token"), special.get("eos_token")
    add_bos = bos is not None and metadata.get("tokenizer.ggml.add_bos_token", adds_bos)
    add_eos = eos is not None and metadata.get("tokenizer.ggml.add_eos_token", False)
    _frame(backend, bos if add_bos else None, eos if add_eos else None)
    return Tokenizer(backend, bos_token=bos, eos_token=eos)


def _frame(backend: tokenizers.Tokenizer, before: str | None, after: str | None) -> None:
    """Makes encoding with special tokens put these tokens around every text, and nothing else."""
    special = [(token, backend.token_to_id(token)) for token in (before, after) if token is not None]
    template = [before, "$A", after]
    backend.post_processor = TemplateProcessing(
        single=[part for part in template if part is not None], special_tokens=special
    )


def _byte_level(tokens: Sequence[str], types: Sequence[int], merges: Sequence[str], pre: str) -> tokenizers.Tokenizer:
    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise CheckpointError(f"GGUF pre-tokenizer {pre!r} is not supported; these are: {known}")
    build = _PRE_TOKENIZERS[pre]
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    model = models.BPE(vocab=_vocabulary(tokens, types), merges=pairs, ignore_merges=build is _llama3)
    backend = tokenizers.Tokenizer(model)
    if build is _qwen2:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = build()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float], prefix: bool
) -> tokenizers.Tokenizer:
    """SentencePiece's BPE joins the pair whose result scores highest, so every way to split a piece is a merge."""
    if len(scores) != len(tokens):
        raise CheckpointError("the GGUF tokenizer needs a score for each token (tokenizer.ggml.scores)")
    vocabulary = _vocabulary(tokens, types)
    merges = []
    for token, score, type_ in zip(tokens, scores, types, strict=True):
        if type_ != TokenType.NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((-score, vocabulary[left], vocabulary[right], left, right))
    merges.sort()
    unknown = next((token for token, type_ in zip(tokens, types, strict=True) if type_ == TokenType.UNKNOWN), None)
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=[(left, right) for *_, left, right in merges],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps = [normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *steps] if prefix else steps)
    decode = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*decode, decoders.Strip(" ", 1, 0)] if prefix else decode)
    return backend


def _vocabulary(tokens: Sequence[str], types: Sequence[int]) -> dict[str, int]:
    return {
        token: index
        for index, (token, type_) in enumerate(zip(tokens, types, strict=True))
        if type_ != TokenType.UNUSED
    }


def gguf_special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Name as in Hugging Face's files (``bos_token``, ...) -> token."""
    tokens = metadata["tokenizer.ggml.tokens"]
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    return {name: tokens[index] for name, index in ids.items() if index is not None and 0 <= index < len(tokens)}
