"""NVIDIA GPUs: their number by the device files, and their gauges by NVIDIA's management library (NVML).

The gauges need a driver and the package nvidia-ml-py (extra `gpu`).
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from charonia.server.metrics.devices import GpuGauges

_DEVICE = re.compile(r"nvidia[0-9]+")
_MILLI = 1000


def visible_gpus(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> int:
    """Return the number of GPUs, within what CUDA_VISIBLE_DEVICES allows.

    The driver makes one device file for each GPU, so no library has to be loaded for this.

    Args:
        devices: Folder of the device files.
    """
    present = sum(1 for entry in devices.glob("nvidia*") if _DEVICE.fullmatch(entry.name))
    allowed = environment.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return present
    count = 0
    for device in allowed.split(","):
        # As in CUDA, the first invalid entry ends the list.
        name = device.strip()
        if not name or name == "-1" or (name.isdecimal() and int(name) >= present):
            break
        count += 1
    return min(count, present)


@dataclass(frozen=True, slots=True)
class NvmlDevice:
    """A GPU that this process may use.

    Attributes:
        capability: CUDA compute capability, such as "9.0"; "" where the driver does not report it.
    """

    index: int
    uuid: str
    name: str
    memory_bytes: int
    capability: str


class Nvml:
    """The library, started. Raises OSError: The driver is missing, or does not answer."""

    def __init__(self, api: Any, environment: Mapping[str, str] = os.environ) -> None:
        self._api = api
        try:
            api.nvmlInit()
            handles = [api.nvmlDeviceGetHandleByIndex(index) for index in range(api.nvmlDeviceGetCount())]
            self._handles = [
                (index, handle)
                for index, handle in enumerate(handles)
                if _is_visible(index, _text(api.nvmlDeviceGetUUID(handle)), environment.get("CUDA_VISIBLE_DEVICES"))
            ]
        except api.NVMLError as error:
            raise OSError(f"NVML does not answer: {error}") from error
        self._begin = {index: self._energy(handle) for index, handle in self._handles}

    @classmethod
    def find(cls) -> "Nvml | None":
        """Return the library where it is installed and has a driver, else None."""
        try:
            return cls(import_module("pynvml"))
        except (ImportError, OSError):
            return None

    def driver(self) -> tuple[str, str]:
        """Return the driver's version and the newest version of CUDA that it runs; "" where it does not report one."""
        cuda = self._ask(self._api.nvmlSystemGetCudaDriverVersion_v2)
        version = f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda is not None else ""
        return _text(self._ask(self._api.nvmlSystemGetDriverVersion) or ""), version

    def devices(self) -> list[NvmlDevice]:
        """Return the GPUs."""
        api = self._api
        found = []
        for index, handle in self._handles:
            memory = self._ask(api.nvmlDeviceGetMemoryInfo, handle)
            capability = self._ask(api.nvmlDeviceGetCudaComputeCapability, handle)
            found.append(
                NvmlDevice(
                    index,
                    _text(api.nvmlDeviceGetUUID(handle)),
                    _text(self._ask(api.nvmlDeviceGetName, handle) or ""),
                    memory.total if memory is not None else 0,
                    ".".join(map(str, capability)) if capability else "",
                )
            )
        return found

    def read(self) -> list[GpuGauges]:
        """Return the gauges of each GPU; None for a gauge that cannot be read."""
        api = self._api
        gpus = []
        for index, handle in self._handles:
            rates = self._ask(api.nvmlDeviceGetUtilizationRates, handle)
            memory = self._ask(api.nvmlDeviceGetMemoryInfo, handle)
            power = self._ask(api.nvmlDeviceGetPowerUsage, handle)
            limit = self._ask(api.nvmlDeviceGetEnforcedPowerLimit, handle)
            energy, begin = self._energy(handle), self._begin[index]
            gpus.append(
                GpuGauges(
                    _text(api.nvmlDeviceGetUUID(handle)),
                    rates.gpu / 100 if rates is not None else None,
                    memory.total if memory is not None else None,
                    memory.used if memory is not None else None,
                    power / _MILLI if power is not None else None,
                    limit / _MILLI if limit is not None else None,
                    (energy - begin) / _MILLI if energy is not None and begin is not None else None,
                )
            )
        return gpus

    def _energy(self, handle: object) -> int | None:
        """Return the energy since the driver was loaded, in millijoules."""
        energy: int | None = self._ask(self._api.nvmlDeviceGetTotalEnergyConsumption, handle)
        return energy

    def _ask(self, question: Callable[..., Any], *arguments: object) -> Any:
        try:
            return question(*arguments)
        except self._api.NVMLError:  # not every GPU and driver answers everything
            return None


def _is_visible(index: int, uuid: str, allowed: str | None) -> bool:
    """Whether CUDA_VISIBLE_DEVICES, a list of numbers and beginnings of uuids, lets this process use a GPU."""
    if allowed is None:
        return True
    names = [name.strip() for name in allowed.split(",")]
    return any(name == str(index) or (bool(name) and not name.isdecimal() and uuid.startswith(name)) for name in names)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
