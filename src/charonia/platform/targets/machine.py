"""What this machine has for deployments."""

import os
import re
from pathlib import Path

import psutil

from charonia.platform.targets.fit import LocalMachine

_DEVICE = re.compile(r"nvidia[0-9]+")


def this_machine(devices: Path = Path("/dev")) -> LocalMachine:
    """Return what this machine has now: the driver of GPUs makes one device file for each."""
    gpus = sum(1 for entry in devices.glob("nvidia*") if _DEVICE.fullmatch(entry.name))
    return LocalMachine(len(os.sched_getaffinity(0)), psutil.virtual_memory().available, gpus)
