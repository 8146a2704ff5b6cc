import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from paceline.checkpoint.error import CheckpointError
from paceline.checkpoint.tokenizer import folder_tokenizer
from paceline.engine.invalid import InvalidRequest
from tiny_models import BOS_ID, EOS_ID, IM_END_ID, save_tokenizer, tiny_tokenizer


def save(folder: Path, config: dict[str, Any] | None = None, *, processor: bool = False) -> None:
    backend = tiny_tokenizer()
    if processor:
        backend.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS_ID)])
    backend.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_equals_transformers(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer, reference = folder_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in ("", "hello world", "the user\n\n été 漢字 🙂", "<|im_start|>user\nhello<|im_end|>", "<bos>the"):
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text)
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert [tokenizer.token(token) for token in ids] == reference.convert_ids_to_tokens(ids)
    assert tokenizer.vocab_size == len(reference)


@pytest.mark.parametrize("written", ["<eos>", {"content": "<eos>", "lstrip": False, "__type": "AddedToken"}])
def test_special_tokens_as_string_or_object(tmp_path: Path, written: object) -> None:
    save(tmp_path, {"bos_token": None, "eos_token": written})
    tokenizer = folder_tokenizer(tmp_path)
    assert (tokenizer.bos_token, tokenizer.bos_id) == (None, None)
    assert (tokenizer.eos_token, tokenizer.eos_id) == ("<eos>", EOS_ID)


def test_special_tokens_map_is_read_and_overridden(tmp_path: Path) -> None:
    save(tmp_path, {"eos_token": "<|im_end|>"})
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))
    tokenizer = folder_tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (BOS_ID, IM_END_ID)


def test_without_config(tmp_path: Path) -> None:
    save(tmp_path)
    tokenizer = folder_tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.adds_bos) == (None, None, False)


@pytest.mark.parametrize("processor", [False, True])
@pytest.mark.parametrize("stated", [None, False, True])
def test_tokenizer_json_decides_about_the_bos(tmp_path: Path, processor: bool, stated: bool | None) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>"}
    save(tmp_path, config if stated is None else {**config, "add_bos_token": stated}, processor=processor)
    tokenizer, reference = folder_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode("hello") == reference.encode("hello")
    assert tokenizer.adds_bos is processor


def test_a_bos_in_the_text_is_not_doubled(tmp_path: Path) -> None:
    """failure 34: a prompt that was rendered elsewhere starts with the BOS already."""
    save(tmp_path, {"bos_token": "<bos>"}, processor=True)
    tokenizer = folder_tokenizer(tmp_path)
    once = tokenizer.encode("hello")
    assert once.count(BOS_ID) == 1
    assert once[0] == BOS_ID
    assert tokenizer.encode("<bos>hello") == once
    assert tokenizer.encode("<bos>hello", add_special_tokens=False) == once
    assert tokenizer.encode("hello", add_special_tokens=False) == once[1:]
    assert tokenizer.encode("<bos>") == [BOS_ID]
    assert tokenizer.encode("") == [BOS_ID]


def test_saved_truncation_and_padding_are_off(tmp_path: Path) -> None:
    backend = tiny_tokenizer()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = folder_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("hello world, the user and the assistant")) == (
        "hello world, the user and the assistant"
    )
    assert len(tokenizer.encode("a")) == 1


def test_half_a_surrogate_pair(tmp_path: Path) -> None:
    """JSON can carry what no text can: ``"\\ud800"``."""
    save(tmp_path)
    with pytest.raises(InvalidRequest, match="prompt: is not valid Unicode at character 2"):
        folder_tokenizer(tmp_path).encode("ab\ud800")


def test_ids_outside_the_vocabulary_give_no_text(tmp_path: Path) -> None:
    save(tmp_path)
    tokenizer = folder_tokenizer(tmp_path)
    assert tokenizer.decode([tokenizer.vocab_size, 10**6, *tokenizer.encode("hello")]) == "hello"
    assert tokenizer.token(tokenizer.vocab_size) == ""


def test_broken_bytes_never_raise(tmp_path: Path) -> None:
    save(tmp_path)
    tokenizer = folder_tokenizer(tmp_path)
    ids = tokenizer.encode("é🙂")
    assert tokenizer.decode(ids[:1]) == "\ufffd"
    assert tokenizer.decode(ids[1:]).endswith("🙂")


def longest_stall(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds that ``work`` takes in another thread, and the longest that this one could not run meanwhile."""
    spent: list[float] = []

    def timed() -> None:
        start = time.perf_counter()
        work()
        spent.append(time.perf_counter() - start)

    thread = threading.Thread(target=timed)
    stall, last = 0.0, time.perf_counter()
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        now = time.perf_counter()
        stall, last = max(stall, now - last), now
    return spent[0], stall


def test_other_threads_run_meanwhile(tmp_path: Path) -> None:
    """A long text in a thread must not stop the event loop of a server."""
    save_tokenizer(tmp_path)
    tokenizer = folder_tokenizer(tmp_path)
    text = "".join(f"the user {number} says hello\n" for number in range(20_000))
    ids = tokenizer.encode(text)
    for work in (lambda: tokenizer.encode(text), lambda: tokenizer.decode(ids * 4)):
        # The least of several: a busy machine stalls threads, too.
        shares = [stall / spent for spent, stall in (longest_stall(work) for _ in range(5))]
        assert min(shares) < 0.5


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json\. Make one with transformers"):
        folder_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        folder_tokenizer(tmp_path)
