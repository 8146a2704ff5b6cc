"""Cores for servers in processes of their own, named as ``served_core:NAME``."""

import time

from fake_core import fake_core
from paceline.core import EngineCore, Progress
from paceline.engine.config import EngineConfig


def steady(config: EngineConfig, progress: Progress) -> EngineCore:
    """10 ms a step, 32 sequences at once."""
    return fake_core(delay_s=0.01, max_num_seqs=32, num_blocks=8192, max_model_len=1024)


def slow_to_load(config: EngineConfig, progress: Progress) -> EngineCore:
    progress("Loading", 0.1)
    time.sleep(60)
    raise AssertionError("the test should have ended it")


def broken(config: EngineConfig, progress: Progress) -> EngineCore:
    raise ValueError("model.norm.weight is missing")
