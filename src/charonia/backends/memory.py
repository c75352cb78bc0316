"""Memory of this process, where its C library is glibc."""

import ctypes
from collections.abc import Mapping

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
