import time
from types import SimpleNamespace

import pytest

from paceline.lab import gpu_watch
from paceline.lab.gpu_watch import is_local, watching
from paceline.lab.target import Target

LOCAL = Target(name="a", url="http://127.0.0.1:8000", model="m")


class FakeNvml:
    """Two GPUs that take 100 and 300 W and are busy half and all of the time."""

    class NVMLError(Exception):
        pass

    counts = True

    def __init__(self) -> None:
        self.closed = False

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu):
        if not self.counts:
            raise self.NVMLError
        return time.monotonic() * 1e3 * (100, 300)[gpu]

    def nvmlDeviceGetPowerUsage(self, gpu):
        return (100_000, 300_000)[gpu]

    def nvmlDeviceGetUtilizationRates(self, gpu):
        return SimpleNamespace(gpu=(50, 100)[gpu])

    def nvmlShutdown(self):
        self.closed = True


@pytest.mark.parametrize("counts", [True, False])
def test_power_energy_and_use(monkeypatch, counts):
    nvml = FakeNvml()
    nvml.counts = counts
    monkeypatch.setattr(gpu_watch, "_nvml", lambda: nvml)
    monkeypatch.setattr(gpu_watch, "INTERVAL_S", 0.01)
    with watching(LOCAL) as found:
        assert found == {}
        time.sleep(0.2)
    assert found["gpus"] == 2
    assert found["power_w"] == pytest.approx(400, rel=0.1)
    assert found["energy_j"] == pytest.approx(80, rel=0.3)
    assert found["utilisation"] == pytest.approx(0.75)
    assert nvml.closed


def test_nothing_is_watched_for_an_engine_elsewhere(monkeypatch):
    monkeypatch.setattr(gpu_watch, "_nvml", lambda: pytest.fail("the GPUs here have nothing to do with it"))
    with watching(Target(name="a", url="https://example.org", model="m")) as found:
        pass
    assert found == {}


def test_without_the_library_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(gpu_watch, "_nvml", lambda: None)
    with watching(LOCAL) as found:
        pass
    assert found == {}


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("http://localhost:1", True),
        ("http://127.0.0.1", True),
        ("http://[::1]:80", True),
        ("http://10.0.0.1", False),
        ("http://engine", False),
    ],
)
def test_which_urls_are_here(url, local):
    assert is_local(url) is local
