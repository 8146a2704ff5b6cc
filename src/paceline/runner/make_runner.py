"""Which runner carries out steps."""

from collections.abc import Callable

import torch

from paceline.checkpoint.checkpoint import Checkpoint
from paceline.engine.config import EngineConfig, InvalidConfig
from paceline.runner.cpu import CPURunner
from paceline.runner.gpu import GPURunner


def make_runner(
    config: EngineConfig, checkpoint: Checkpoint, progress: Callable[[str, float], None] | None = None
) -> CPURunner | GPURunner:
    """The runner of the device that ``config`` names, or of the GPU if there is one.

    Raises:
        InvalidConfig: a GPU is asked for and there is none; or what the runner itself raises.
    """
    gpu = torch.cuda.is_available()
    if config.device == "cuda" and not gpu:
        raise InvalidConfig("device: cuda was asked for, and torch finds no GPU")
    if config.device == "cuda" or (config.device == "auto" and gpu):
        return GPURunner(config, checkpoint, progress)
    return CPURunner(config, checkpoint, progress)
