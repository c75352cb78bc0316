from types import SimpleNamespace
from typing import Any

import pytest

from charonia.server.machine.gauges import GaugeReader
from charonia.server.machine.gpus import Nvml


class NVMLError(Exception):
    """As pynvml has it."""


class FakeNvml:
    """Two GPUs: the second one has no meter of energy."""

    NVMLError = NVMLError

    def __init__(self) -> None:
        self.energy = 5000
        self.reads = 0

    def nvmlInit(self) -> None:  # noqa: N802 - as pynvml has it
        """Do nothing."""

    def __getattr__(self, name: str) -> Any:
        answers = {
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}{handle}".encode(),
            "nvmlDeviceGetName": lambda handle: "Fake 9000",
            "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=1000, used=400),
            "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0),
            "nvmlDeviceGetUtilizationRates": self._rates,
            "nvmlDeviceGetPowerUsage": lambda handle: 70_500,
            "nvmlDeviceGetEnforcedPowerLimit": lambda handle: 300_000,
            "nvmlDeviceGetTotalEnergyConsumption": self._energy,
            "nvmlSystemGetDriverVersion": lambda: b"580.1",
            "nvmlSystemGetCudaDriverVersion_v2": lambda: 13020,
        }
        return answers[name]

    def _rates(self, handle: int) -> object:
        self.reads += 1
        return SimpleNamespace(gpu=25)

    def _energy(self, handle: int) -> int:
        if handle == 1:
            raise NVMLError("Not Supported")
        return self.energy


def test_a_gpu_is_read_in_the_units_of_the_metrics_and_energy_counts_from_the_start() -> None:
    api = FakeNvml()
    nvml = Nvml(api, {})
    api.energy = 8500

    first, second = nvml.read()

    assert (first.uuid, first.utilization, first.memory_total_bytes, first.memory_used_bytes) == (
        "GPU-00",
        0.25,
        1000,
        400,
    )
    assert (first.power_watts, first.power_limit_watts, first.energy_joules) == (70.5, 300.0, 3.5)
    assert second.energy_joules is None


@pytest.mark.parametrize(("visible", "indexes"), [("1", [1]), ("GPU-1", [1]), ("1,0", [0, 1]), ("", []), ("-1", [])])
def test_only_gpus_that_this_process_may_use_are_read(visible: str, indexes: list[int]) -> None:
    nvml = Nvml(FakeNvml(), {"CUDA_VISIBLE_DEVICES": visible})

    assert [device.index for device in nvml.devices()] == indexes


def test_devices_and_driver_are_described() -> None:
    nvml = Nvml(FakeNvml(), {})

    assert nvml.driver() == ("580.1", "13.2")
    assert (nvml.devices()[0].name, nvml.devices()[0].capability) == ("Fake 9000", "9.0")


def test_a_driver_that_does_not_answer_is_an_error_of_the_system() -> None:
    api = FakeNvml()

    def fail() -> None:
        raise NVMLError("Driver Not Loaded")

    api.nvmlInit = fail  # type: ignore[method-assign]

    with pytest.raises(OSError, match="Driver Not Loaded"):
        Nvml(api, {})


def test_gpus_are_read_once_an_interval() -> None:
    api = FakeNvml()
    times = iter([0, 999_999, 1_000_000])
    sampler = GaugeReader(Nvml(api, {}).read, 1, lambda: next(times))

    first, again, later = sampler.sample(), sampler.sample(), sampler.sample()

    assert again is first
    assert later is not first
    assert api.reads == 4
