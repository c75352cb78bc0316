"""The machine of a measurement, without which figures are not comparable."""

import os
import platform
from importlib.metadata import version
from pathlib import Path

import psutil

from charonia import compiled
from charonia.server.doctor.machine import is_optimised


def machine() -> dict[str, str | int | float]:
    """Return the facts that influence the figures."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "python_optimised": is_optimised(),
        "form": compiled.form,
        "load_1min": round(os.getloadavg()[0], 2),
        **{package: version(package) for package in ("charonia", "onnxruntime", "numpy", "uvloop")},
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
