"""Power, energy and use of this machine's GPUs while a stage runs (`nvidia-ml-py`)."""

import importlib.util
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from paceline.lab.target import Target

INTERVAL_S = 0.1


class GpuWatch:
    """Samples all GPUs of this machine in a thread."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._gpus = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        self._stop = threading.Event()
        self._use: list[float] = []
        self._power: list[float] = []
        self._energy = self._joules()
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._sample, name="gpu-watch", daemon=True)
        self._thread.start()

    def _joules(self) -> float | None:
        """Counted by the GPUs since their driver was loaded; None where one does not count."""
        try:
            return sum(self._nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) for gpu in self._gpus) / 1e3
        except self._nvml.NVMLError:
            return None

    def _sample(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self._use.append(sum(self._nvml.nvmlDeviceGetUtilizationRates(gpu).gpu for gpu in self._gpus) / 100)
            self._power.append(sum(self._nvml.nvmlDeviceGetPowerUsage(gpu) for gpu in self._gpus) / 1e3)

    def stop(self) -> dict[str, float]:
        """``gpus``; ``power_w`` and ``energy_j`` of all together; ``utilisation``, 0 to 1, the mean over them."""
        self._stop.set()
        self._thread.join()
        elapsed = time.monotonic() - self._started
        energy = self._joules()
        found = {"gpus": float(len(self._gpus))}
        if energy is not None and self._energy is not None:
            found |= {"energy_j": energy - self._energy, "power_w": (energy - self._energy) / elapsed}
        elif self._power:
            power = sum(self._power) / len(self._power)
            found |= {"power_w": power, "energy_j": power * elapsed}
        if self._use:
            found["utilisation"] = sum(self._use) / len(self._use) / len(self._gpus)
        return found


@contextmanager
def watching(target: Target) -> Iterator[dict[str, float]]:
    """A dict that is filled at the end; it stays empty without a GPU, without `nvidia-ml-py`, or if the engine runs on
    another machine."""
    found: dict[str, float] = {}
    nvml = _nvml() if is_local(target.url) else None
    if nvml is None:
        yield found
        return
    watch = GpuWatch(nvml)
    try:
        yield found
    finally:
        found |= watch.stop()
        nvml.nvmlShutdown()


def is_local(url: str) -> bool:
    """Whether a URL names this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _nvml() -> ModuleType | None:
    if importlib.util.find_spec("pynvml") is None:
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    if pynvml.nvmlDeviceGetCount() == 0:
        return None
    found: ModuleType = pynvml
    return found
