"""Tiny random models in Hugging Face folders: real enough to load, small enough to make in every test."""

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

Family = Literal["llama", "mistral", "qwen2", "qwen3"]

FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}

SPECIAL_TOKENS = ("<bos>", "<eos>", "<|im_start|>", "<|im_end|>")
BOS_ID, EOS_ID, IM_START_ID, IM_END_ID = 0, 1, 2, 3
WORDS = ("the", "and", "hello", "world", "user", "assistant", "system")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE: 4 special tokens, the 256 bytes, and the merges of a few words (with and without a space)."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *sorted(ByteLevel.alphabet())))}
    merges: list[tuple[str, str]] = []
    for word in (*WORDS, *(f"Ġ{word}" for word in WORDS)):
        left = word[0]
        for letter in word[1:]:
            if left + letter not in vocabulary:
                merges.append((left, letter))
                vocabulary[left + letter] = len(vocabulary)
            left += letter
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def save_tokenizer(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    """Writes tokenizer.json and tokenizer_config.json."""
    tokenizer = tiny_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<|im_end|>",
        "clean_up_tokenization_spaces": False,
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer


def tiny_model(family: Family, *, tied: bool = False, seed: int = 0, **config_overrides: Any) -> PreTrainedModel:
    """A random float32 model whose logits are far from flat: about one unit apart, so greedy choices are stable."""
    config_class, model_class = FAMILIES[family]
    config = config_class(
        **{
            "vocab_size": tiny_tokenizer().get_vocab_size(),
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 512,
            "tie_word_embeddings": tied,
            "bos_token_id": BOS_ID,
            "eos_token_id": IM_END_ID,
            "pad_token_id": None,
            "attn_implementation": "eager",
            "dtype": "float32",
            **config_overrides,
        }
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).to(torch.float32).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name.endswith("bias"):
                    weight.normal_(0.0, 0.3)
                elif weight.dim() == 1:
                    weight.normal_(1.0, 0.2)
                elif "embed_tokens" in name and not tied:
                    weight.normal_(0.0, 1.0)
                else:
                    weight.normal_(0.0, 1.4 * weight.shape[1] ** -0.5)
    return model


def make_tiny(
    folder: Path,
    family: Family,
    *,
    tied: bool = False,
    shards: int = 1,
    seed: int = 0,
    chat_template: str | None = CHAT_TEMPLATE,
    **config_overrides: Any,
) -> PreTrainedModel:
    """Saves a random tiny model, its tokenizer and its generation defaults as a Hugging Face folder; returns the model.

    Args:
        folder: made when missing.
        tied: the output head is the embedding; no ``lm_head.weight`` on disk.
        shards: number of safetensors files; above 1 there is an index.
        chat_template: None leaves the template out.
        config_overrides: passed to the transformers config, for example ``sliding_window=8``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = tiny_model(family, tied=tied, seed=seed, **config_overrides)
    model.save_pretrained(folder)
    if shards > 1:
        _shard(folder, shards)
    save_tokenizer(folder, chat_template=chat_template)
    generation = {"bos_token_id": BOS_ID, "eos_token_id": [IM_END_ID, EOS_ID], "do_sample": True, "temperature": 1.0}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return model


def _shard(folder: Path, shards: int) -> None:
    """Splits model.safetensors into exactly ``shards`` files and an index."""
    whole = folder / "model.safetensors"
    tensors = load_file(whole)
    whole.unlink()
    files = [f"model-{index + 1:05d}-of-{shards:05d}.safetensors" for index in range(shards)]
    weight_map = {name: files[index % shards] for index, name in enumerate(sorted(tensors))}
    for file in files:
        part = {name: tensors[name] for name in tensors if weight_map[name] == file}
        save_file(part, folder / file, {"format": "pt"})
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
