"""Small tokenizers of the kinds that generative models use, made in memory."""

from collections.abc import Callable
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

Vocabulary = Callable[[], Tokenizer]

BOS, EOS = "<s>", "</s>"
CORPUS = [
    "the quick brown fox jumps over the lazy dog, and the dog says hello hello world",
    "größer émigré naïve façade, 中文字符 日本語 ไทย, 😀😃👩‍👩‍👧‍👦 one\n\ntwo\n\n\nthree",
]


@cache
def byte_level() -> Tokenizer:
    """Byte-level BPE as in GPT-2, Llama 3, Qwen and SmolLM: every id sequence is a byte sequence."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[BOS, EOS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    # Not special: shown, and its text is no byte-level stand-in.
    tokenizer.add_tokens([AddedToken("<täg 中>", normalized=False)])
    return tokenizer


def _pieces() -> tuple[dict[str, int], list[tuple[str, str]]]:
    pieces = ["<unk>", BOS, EOS, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghilnorstuwé中,"]
    merges = []
    for word in ("▁the", "▁he", "▁hello", "▁world", "hello", "▁▁", "▁中"):
        left = word[0]
        for char in word[1:]:
            if left + char not in pieces:
                merges.append((left, char))
                pieces.append(left + char)
            left += char
    return {piece: index for index, piece in enumerate(pieces)}, merges


def _sentencepiece(decoder: decoders.Decoder, prepend: str) -> Tokenizer:
    vocabulary, merges = _pieces()
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ("<unk>", BOS, EOS)])
    return tokenizer


@cache
def byte_fallback() -> Tokenizer:
    """As Llama 2 and Mistral: a space is put before the text, and stripped from the start of the decoded text."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _sentencepiece(decoders.Sequence(steps), "first")


@cache
def byte_fallback_unstripped() -> Tokenizer:
    """As Gemma: spaces are kept as they are."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return _sentencepiece(decoders.Sequence(steps), "never")


@cache
def metaspace() -> Tokenizer:
    """The older form: byte fallback, then a metaspace decoder."""
    steps = [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first", split=False)]
    return _sentencepiece(decoders.Sequence(steps), "first")
