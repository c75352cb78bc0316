"""What this machine has for deployments."""

import os
import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

from charonia.platform.targets.fit import GpuMemory, LocalMachine

_DEVICE = re.compile(r"nvidia[0-9]+")


def this_machine(devices: Path = Path("/dev")) -> LocalMachine:
    """Return what this machine has now: the driver of GPUs makes one device file for each."""
    gpus = sum(1 for entry in devices.glob("nvidia*") if _DEVICE.fullmatch(entry.name))
    cores = len(os.sched_getaffinity(0))
    return LocalMachine(
        cores,
        psutil.virtual_memory().available,
        gpus,
        gpu_memory() if gpus else (),
        idle_cores=cores * (1.0 - psutil.cpu_percent() / 100.0),
    )


def gpu_memory(api: Any = None) -> Sequence[GpuMemory]:
    """Return the memory of the GPUs, nothing where it is not known.

    Args:
        api: The module `pynvml` of the package nvidia-ml-py (extra `gpu`), None to import it.
    """
    try:
        api = api or import_module("pynvml")
        api.nvmlInit()
    except Exception:  # no package, or no driver: the library has an error class of its own
        return ()
    try:
        handles = [api.nvmlDeviceGetHandleByIndex(number) for number in range(api.nvmlDeviceGetCount())]
        found = [api.nvmlDeviceGetMemoryInfo(handle) for handle in handles]
        return [GpuMemory(int(each.total), int(each.free)) for each in found]
    except api.NVMLError:
        return ()
    finally:
        api.nvmlShutdown()
