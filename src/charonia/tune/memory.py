"""How much memory is left here, in this machine or its control group (container, pod), and what an instance takes."""

from pathlib import Path

import psutil

SHARED_MB = 100.0
"""What the first instance of a model may load for all others too: libraries."""

SHARED_GPU_MB = 600.0
"""The same on a GPU: the context of its process."""

_GROUP = Path("/sys/fs/cgroup")
_FILES = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


def available_mb(group: Path = _GROUP) -> float:
    """Return the memory that can still be taken, in MB (10^6 bytes)."""
    left = float(psutil.virtual_memory().available)
    for limit_name, used_name in _FILES:
        limit, used = _number(group / limit_name), _number(group / used_name)
        if limit is not None and used is not None:
            left = min(left, max(0.0, limit - used))
    return left / 1e6


def of_one_instance(before_mb: float | None, after_mb: float | None, count: int, *, on_gpu: bool = False) -> float:
    """Return the least that one more instance of a model takes, in MB; 0 where that cannot be told.

    Args:
        before_mb: Memory of the server before the model was loaded, None for unknown.
        after_mb: Memory of the server afterwards.
        count: Instances of the model.
        on_gpu: Whether it is the memory of GPUs.
    """
    if before_mb is None or after_mb is None:
        return 0.0
    return max(0.0, after_mb - before_mb - (SHARED_GPU_MB if on_gpu else SHARED_MB)) / count


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such file, or "max"
        return None
