"""The memory of this process: how much it may use, how much it uses, and how glibc returns freed memory."""

import ctypes
from collections.abc import Mapping
from pathlib import Path

import psutil

KEPT_BYTES = 1 << 30
"""Freed memory that the process keeps at most, other than between the loads of models."""

HEAP_ALLOCATION_MAX = 32 << 20
"""Allocations of this size and more are mapped and unmapped one by one. It is the greatest that glibc takes."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_SETTINGS = (
    (_ARENA_MAX, 1, "MALLOC_ARENA_MAX"),
    (_TRIM_THRESHOLD, KEPT_BYTES, "MALLOC_TRIM_THRESHOLD_"),
    (_MMAP_THRESHOLD, HEAP_ALLOCATION_MAX, "MALLOC_MMAP_THRESHOLD_"),
)
"""Parameter of `mallopt`, its value, and the variable by which a user sets it. Source: mallopt(3)."""


def keep_freed_memory(environment: Mapping[str, str]) -> None:
    """Have memory that a batch frees stay for the next batch. To be called before threads are started.

    A network without an allocator of its own, as PyTorch's on a CPU, allocates and frees some 100 MB a batch. By
    default glibc returns them, and the system clears each page of the next batch again: 15 % of the time of a
    ResNet-50 in BF16. Threads have arenas of their own there, which always return what is free, so all take from one.

    Args:
        environment: Of the process. What it sets itself stays.
    """
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    if option is None or "glibc.malloc" in environment.get("GLIBC_TUNABLES", ""):
        return
    for parameter, value, variable in _SETTINGS:
        if variable not in environment:
            option(parameter, value)


def release_freed_memory() -> None:
    """Give memory that was freed back to the system.

    Loading a model frees about twice its weights, which would otherwise stay with this process.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


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
