"""Which runner carries out steps."""

from collections.abc import Callable

import torch

from paceline.checkpoint.checkpoint import Checkpoint
from paceline.engine.config import EngineConfig, InvalidConfig
from paceline.models.decoder import Decoder
from paceline.runner.cpu import CPURunner
from paceline.runner.gpu import GPURunner


def make_runner(
    config: EngineConfig,
    checkpoint: Checkpoint,
    progress: Callable[[str, float], None] | None = None,
    *,
    decoder: Decoder | None = None,
) -> CPURunner | GPURunner:
    """The runner of the device that ``config`` names, or of the GPU if there is one.

    Args:
        progress: told what is being done and the share of it that is done.
        decoder: the checkpoint's weights, where they are loaded on that device already.

    Raises:
        InvalidConfig: a GPU is asked for and there is none; or what the runner itself raises.
    """
    gpu = torch.cuda.is_available()
    if config.device == "cuda" and not gpu:
        raise InvalidConfig("device: cuda was asked for, and torch finds no GPU")
    if config.device == "cuda" or (config.device == "auto" and gpu):
        return GPURunner(config, checkpoint, progress, decoder=decoder)
    return CPURunner(config, checkpoint, progress, decoder=decoder)
