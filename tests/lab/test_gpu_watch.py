import time
from types import SimpleNamespace

import pytest

from paceline.lab import gpu_watch
from paceline.lab.gpu_watch import Gpus, is_local, watching


class FakeNvml:
    """Two GPUs that take 100 and 300 W and are busy half and all of the time, and one that idles at 70 W. Time is what
    the test says."""

    class NVMLError(Exception):
        pass

    counts = True
    seconds = 1000.0

    def __init__(self) -> None:
        self.closed = False

    def nvmlDeviceGetCount(self):
        return 3

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu):
        if not self.counts:
            raise self.NVMLError
        return self.seconds * 1e3 * (100, 300, 70)[gpu]

    def nvmlDeviceGetPowerUsage(self, gpu):
        return (100_000, 300_000, 70_000)[gpu]

    def nvmlDeviceGetUtilizationRates(self, gpu):
        return SimpleNamespace(gpu=(50, 100, 0)[gpu])

    def nvmlDeviceGetName(self, gpu):
        return ("NVIDIA H200", "NVIDIA H200", "NVIDIA L4")[gpu]

    def nvmlSystemGetDriverVersion(self):
        return "570.1"

    def nvmlShutdown(self):
        self.closed = True


@pytest.mark.parametrize("counts", [True, False])
def test_power_energy_and_use(monkeypatch, counts):
    nvml = FakeNvml()
    nvml.counts = counts
    monkeypatch.setattr(gpu_watch, "_nvml", lambda: nvml)
    monkeypatch.setattr(gpu_watch, "INTERVAL_S", 0.01)
    monkeypatch.setattr(gpu_watch, "time", SimpleNamespace(monotonic=lambda: nvml.seconds))
    with watching(here=True) as found:
        assert found.figures == {}
        time.sleep(0.05)
        nvml.seconds += 0.2
    assert found.figures["gpus"] == 2
    assert found.figures["power_w"] == pytest.approx(400)
    assert found.figures["energy_j"] == pytest.approx(80)
    assert found.figures["utilisation"] == pytest.approx(0.75)
    assert found.gpus == [Gpus("NVIDIA H200", 2, "570.1")]
    assert nvml.closed


def test_gpus_that_do_not_work_are_not_claimed(monkeypatch):
    """They idle, or, being partitioned, do not say what they do."""

    def refused(gpu):
        raise FakeNvml.NVMLError

    for says in (lambda gpu: SimpleNamespace(gpu=0), refused):
        nvml = FakeNvml()
        monkeypatch.setattr(nvml, "nvmlDeviceGetUtilizationRates", says)
        monkeypatch.setattr(gpu_watch, "_nvml", lambda nvml=nvml: nvml)
        with watching(here=True) as found:
            pass
        assert (found.figures, found.gpus) == ({}, [])
        assert nvml.closed


def test_nothing_is_watched_for_an_engine_elsewhere(monkeypatch):
    monkeypatch.setattr(gpu_watch, "_nvml", lambda: pytest.fail("the GPUs here have nothing to do with it"))
    with watching(here=False) as found:
        pass
    assert (found.figures, found.gpus) == ({}, [])


def test_without_the_library_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(gpu_watch, "_nvml", lambda: None)
    with watching(here=True) as found:
        pass
    assert (found.figures, found.gpus) == ({}, [])


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
