"""Cores for the engine process in the tests: no model, no torch. Named as ``engine_factories:NAME``."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models

from fake_core import fake_core
from paceline.core import EngineCore
from paceline.engine.config import EngineConfig, InvalidConfig

VOCABULARY = [chr(code) for code in range(32, 127)] + ["é", "中"]
"""One character a token; as many as the fake runner has ids."""

CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)

Report = Callable[[str, float], None]


def tokenizer() -> Tokenizer:
    backend = Tokenizer(models.BPE({text: index for index, text in enumerate(VOCABULARY)}, []))
    backend.decoder = decoders.Fuse()
    return backend


def write_folder(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """A checkpoint without weights: what the front reads."""
    folder.mkdir(exist_ok=True)
    tokenizer().save(str(folder / "tokenizer.json"))
    generation = {"temperature": 0.25, "top_k": 0, "top_p": 0.75}
    files = {
        "config.json": {"model_type": "llama"},
        "tokenizer_config.json": {} if chat_template is None else {"chat_template": chat_template},
        "generation_config.json": generation,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def quick(config: EngineConfig, progress: Report) -> EngineCore:
    progress("Loading", 0.5)
    progress("Loading", 1.0)
    return fake_core(depth=config.depth or 1, sampled_by_seed=True, num_blocks=1024, max_model_len=1024)


def paced(config: EngineConfig, progress: Report) -> EngineCore:
    """5 ms a step, four tokens of budget, two sequences at once: easy to meet queued, in prefill or in decode."""
    return fake_core(
        depth=config.depth or 1,
        delay_s=0.005,
        num_blocks=1024,
        max_num_batched_tokens=4,
        max_num_seqs=2,
        max_model_len=1024,
    )


def breaking(config: EngineConfig, progress: Report) -> EngineCore:
    """The third step raises."""
    core = fake_core(delay_s=0.01)
    step, count = core.step, iter(range(10**9))

    def broken() -> list:
        if next(count) == 2:
            raise RuntimeError("the device is on fire")
        return step()

    core.step = broken  # type: ignore[method-assign]
    return core


def hanging(config: EngineConfig, progress: Report) -> EngineCore:
    """The third step lasts until the process gets SIGUSR1, with the heartbeat alive."""
    core = fake_core()
    step, count, released = core.step, iter(range(10**9)), threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: released.set())

    def slow() -> list:
        if next(count) == 2:
            released.wait()
        return step()

    core.step = slow  # type: ignore[method-assign]
    return core


def leaking(config: EngineConfig, progress: Report) -> EngineCore:
    core = fake_core()

    def check_idle() -> None:
        raise AssertionError("one block is missing")

    core.check_idle = check_idle  # type: ignore[method-assign]
    return core


def unwilling(config: EngineConfig, progress: Report) -> EngineCore:
    progress("Loading", 0.5)
    raise ValueError("model.norm.weight is missing from shard 2")


def misfit(config: EngineConfig, progress: Report) -> EngineCore:
    raise InvalidConfig("kv_cache_bytes=1 gives 0.0 MiB")


def dawdling(config: EngineConfig, progress: Report) -> EngineCore:
    progress("Loading", 0.0)
    time.sleep(60)
    raise AssertionError("unreachable")


def suicidal(config: EngineConfig, progress: Report) -> EngineCore:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def undying(config: EngineConfig, progress: Report) -> EngineCore:
    """Never returns from close."""
    core = fake_core()
    core.close = lambda: time.sleep(3600)  # type: ignore[method-assign]
    return core
