"""Which runner carries out steps."""

from collections.abc import Callable

import torch

from paceline.checkpoint.checkpoint import Checkpoint
from paceline.engine.config import EngineConfig, InvalidConfig
from paceline.engine.sizes import DeviceType
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
    """The runner of the device that ``config`` names.

    Args:
        progress: told what is being done and the share of it that is done.
        decoder: the checkpoint's weights, where they are loaded on that device already.

    Raises:
        InvalidConfig: as `device_type`, and what the runner itself raises.
    """
    if device_type(config) == "cuda":
        return GPURunner(config, checkpoint, progress, decoder=decoder)
    return CPURunner(config, checkpoint, progress, decoder=decoder)


def device_type(config: EngineConfig) -> DeviceType:
    """The device that ``config`` names, or the GPU if there is one.

    Raises:
        InvalidConfig: a GPU is asked for and there is none.
    """
    gpu = torch.cuda.is_available()
    if config.device == "cuda" and not gpu:
        raise InvalidConfig("device: cuda was asked for, and torch finds no GPU")
    return "cuda" if gpu and config.device != "cpu" else "cpu"
