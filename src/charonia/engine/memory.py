"""How much memory this process may use, and how much it and its children take."""

from pathlib import Path

import psutil

BUDGET_SHARE = 0.8
"""Of the memory that this process may use, so much is for models where no budget is set."""


def usable_memory(process: Path = Path("/proc/self"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this process may use: the machine's memory, or the limit of its control group.

    Args:
        process: This process's folder of the proc file system.
        groups: Where control groups are mounted.
    """
    limits = [int(psutil.virtual_memory().total)]
    try:
        lines = (process / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    folders = [groups, groups / "memory"]
    for line in lines:
        _, _, path = line.rpartition(":")
        parts = [part for part in path.split("/") if part not in ("", "..")]
        folders += [top.joinpath(*parts) for top in (groups, groups / "memory")]
    for folder in folders:
        for name in ("memory.max", "memory.limit_in_bytes"):
            try:
                limits.append(int((folder / name).read_text(encoding="ascii")))
            except (OSError, ValueError):  # no such group here, or "max"
                continue
    return min(limits)


def tree_bytes() -> int:
    """Return the resident memory of this process and all that it has started. Takes a few ms."""
    process = psutil.Process()
    total = 0
    for each in (process, *process.children(recursive=True)):
        try:
            total += int(each.memory_info().rss)
        except psutil.Error:  # it has just ended
            continue
    return total
