"""Models with times that are easy to add up."""

from paceline.engine.step_time import StepTime
from paceline.simulator.gpu_model import EngineSizes, GpuModel


def gpu_model(request_s: float = 0.0, sizes: dict[str, int] | None = None, **coefficients: float) -> GpuModel:
    engine = {"block_size": 16, "num_blocks": 4001, "max_model_len": 4096, "depth": 1} | (sizes or {})
    return GpuModel(name="round", step_time=StepTime(**coefficients), engine=EngineSizes(**engine), request_s=request_s)
