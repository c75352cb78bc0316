"""How many NVIDIA GPUs this process can see."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

_DEVICE = re.compile(r"nvidia[0-9]+")


def visible_gpus(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> int:
    """Return the number of GPUs, within what CUDA_VISIBLE_DEVICES allows.

    The driver makes one device file a GPU, so no library has to be loaded for the answer.

    Args:
        environment: Environment variables.
        devices: Folder of the device files.
    """
    present = sum(1 for entry in devices.glob("nvidia*") if _DEVICE.fullmatch(entry.name))
    allowed = environment.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return present
    count = 0
    for device in allowed.split(","):
        # As CUDA reads it: the first entry that names no device ends the list.
        name = device.strip()
        if not name or name == "-1" or (name.isdecimal() and int(name) >= present):
            break
        count += 1
    return min(count, present)
