"""Names, power, energy and use of the GPUs of this machine that work while a stage runs (`nvidia-ml-py`)."""

import importlib.util
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class Gpus:
    """GPUs of one model."""

    name: str
    """As the driver names it: ``NVIDIA H200``."""
    count: int
    driver: str
    """Version."""


@dataclass(slots=True)
class Watched:
    """Of the GPUs that were at work. Filled at the end; empty where none was."""

    figures: dict[str, float] = field(default_factory=dict)
    """``gpus``, their number; ``power_w`` and ``energy_j`` of all together; ``utilisation``, 0 to 1, their mean."""
    gpus: list[Gpus] = field(default_factory=list)


class _Gpu:
    def __init__(self, nvml: Any, index: int) -> None:
        self._nvml = nvml
        self._handle = nvml.nvmlDeviceGetHandleByIndex(index)
        name = nvml.nvmlDeviceGetName(self._handle)
        self.name: str = name.decode() if isinstance(name, bytes) else name
        self.use: list[float] = []
        self._power: list[float] = []
        self._joules = self._counted()

    def sample(self) -> None:
        self.use.append(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100)
        self._power.append(self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3)

    def _counted(self) -> float | None:
        """Joules since the driver was loaded; None where the GPU does not count them."""
        try:
            return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3
        except self._nvml.NVMLError:
            return None

    def energy_j(self, elapsed_s: float) -> float:
        """Since the start: counted, or from samples of the power."""
        now = self._counted()
        if now is not None and self._joules is not None:
            return now - self._joules
        return sum(self._power) / len(self._power) * elapsed_s


class GpuWatch:
    """Samples all GPUs of this machine in a thread."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._gpus = [_Gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
        self._stop = threading.Event()
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="gpu-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self._sample()

    def _sample(self) -> None:
        for gpu in self._gpus:
            try:
                gpu.sample()
            except self._nvml.NVMLError:  # A GPU that is partitioned does not say.
                continue

    def stop(self) -> Watched:
        """A GPU counts if it was seen at work: an engine may use one of eight, or none."""
        self._stop.set()
        self._thread.join()
        self._sample()
        elapsed = time.monotonic() - self._started
        working = [gpu for gpu in self._gpus if any(gpu.use)]
        if not working:
            return Watched()
        energy = sum(gpu.energy_j(elapsed) for gpu in working)
        use = sum(sum(gpu.use) / len(gpu.use) for gpu in working) / len(working)
        figures = {"gpus": float(len(working)), "energy_j": energy, "power_w": energy / elapsed, "utilisation": use}
        driver = self._nvml.nvmlSystemGetDriverVersion()
        version = driver.decode() if isinstance(driver, bytes) else driver
        names = Counter(gpu.name for gpu in working)
        return Watched(figures, [Gpus(name, count, version) for name, count in names.items()])


@contextmanager
def watching(here: bool) -> Iterator[Watched]:
    """Watches while inside. What it gives stays empty without a GPU, without `nvidia-ml-py`, and if the engine is not
    ``here``, on this machine."""
    found = Watched()
    nvml = _nvml() if here else None
    if nvml is None:
        yield found
        return
    watch = GpuWatch(nvml)
    try:
        yield found
    finally:
        seen = watch.stop()
        found.figures, found.gpus = seen.figures, seen.gpus
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
