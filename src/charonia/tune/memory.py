"""How much memory is left here: of the machine, or of the control group (container, pod) that this process is in."""

from pathlib import Path

import psutil

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


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such file, or "max"
        return None
