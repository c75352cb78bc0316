"""The memory of this process: its limit, its use, and the settings of glibc's allocator.

Freed memory is kept for the next requests (`keep_freed_memory`), because new memory costs them time. After a burst it
is returned to the operating system when the load has been low for some seconds: in steps, so that a burst that follows
soon finds most of it.
"""

import asyncio
import ctypes
import gc
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

from charonia.server.machine.cores import control_groups

MEMORY_S = 1.0
"""Interval of checks of memory limits."""

BUDGET_SHARE = 0.8
"""Share of the usable memory that models may take where no budget is set."""

KEPT_BYTES = 1 << 30
"""Limit of freed memory that the process keeps; a load of a model and the end of a burst release it."""

RESERVE_BYTES = 32 << 20
"""Freed memory that is kept when a burst is over, for the first requests of the next one."""

NEW_OBJECTS_MAX = 20_000
"""New Python objects after which garbage is collected immediately: more than all requests in flight have, as a rule."""

HEAP_ALLOCATION_MAX = 32 << 20
"""Allocations of this size and more are mapped and unmapped one by one. It is glibc's maximum."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_SETTINGS = (
    (_ARENA_MAX, 1, "MALLOC_ARENA_MAX"),
    (_TRIM_THRESHOLD, KEPT_BYTES, "MALLOC_TRIM_THRESHOLD_"),
    (_MMAP_THRESHOLD, HEAP_ALLOCATION_MAX, "MALLOC_MMAP_THRESHOLD_"),
)
"""Parameter of `mallopt`, its value, and the variable by which a user sets it. Source: mallopt(3)."""

QUIET_S = 5
"""Seconds of low load before each step."""

STEPS = 4
"""Number of equal parts in which memory is returned."""

BUSY_CPU_S = 0.1
"""CPU time that makes a second count as load."""

LOW_SHARE = 0.05
"""A second is quiet if it takes at most this share of the CPU time of the busiest one since the last step."""


class IdleMemory:
    """Decides when to return memory to the system, and how much."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._busiest_s = 0.0
        self._quiet = 0
        self._steps_left = STEPS

    def second_passed(self, cpu_s: float) -> float | None:
        """Take in the CPU time of the process so far; to be called every second.

        Returns:
            The share of the free memory to keep if the rest should be returned now, 0 in the last step; None otherwise.
        """
        used_s, self._total_s = cpu_s - self._total_s, cpu_s
        self._busiest_s = max(self._busiest_s, used_s)
        if self._busiest_s < BUSY_CPU_S or used_s > self._busiest_s * LOW_SHARE:
            self._quiet, self._steps_left = 0, STEPS
            return None
        self._quiet += 1
        if self._quiet < QUIET_S:
            return None
        self._quiet = 0
        self._steps_left -= 1
        if self._steps_left:
            return self._steps_left / (self._steps_left + 1)
        self._busiest_s, self._steps_left = 0.0, STEPS
        return 0.0


def keep_freed_memory(environment: Mapping[str, str]) -> None:
    """Keep the memory that a batch frees for the next batch. To be called before threads are started.

    A framework without an allocator, such as PyTorch on a CPU, allocates and frees some 100 MB per batch. By
    default glibc returns them to the system, which clears each page again for the next batch: 15 % of the time of a
    ResNet-50 in BF16. The arenas of other threads always return free memory, so all threads share one arena.

    Args:
        environment: Environment variables of the process. Settings of glibc in it take precedence.
    """
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    if option is None or "glibc.malloc" in environment.get("GLIBC_TUNABLES", ""):
        return
    for parameter, value, variable in _SETTINGS:
        if variable not in environment:
            option(parameter, value)


def collect_less_often() -> None:
    """Exempt all objects that live now from garbage collection, and collect new ones when there are many of them.

    By default Python collects whenever there are 700 new objects, which 64 requests in flight have: each time it finds
    them all alive. To be called when the models are loaded, with `trim_idle_memory` to collect every second.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS_MAX)


def release_freed_memory(reserve_bytes: int = 0) -> None:
    """Return freed memory to the system.

    The load of a model frees about twice the size of its weights, which this process would otherwise keep.

    Args:
        reserve_bytes: Size of the free end of the heap that is kept.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(reserve_bytes))


async def trim_idle_memory() -> None:
    """Collect garbage every second, and return freed memory to the system after bursts of load, until cancelled."""
    idle = IdleMemory()
    while True:
        await asyncio.sleep(1.0)
        gc.collect(1)
        share = idle.second_passed(time.process_time())
        if share is not None:
            gc.collect()  # connections that are over
            await asyncio.to_thread(release_freed_memory, max(RESERVE_BYTES, int(_free_end_of_heap() * share)))


class _MallInfo(ctypes.Structure):
    """Result of `mallinfo2`. Source: mallinfo(3)."""

    _fields_ = (("others", 9 * ctypes.c_size_t), ("keepcost", ctypes.c_size_t))


def _free_end_of_heap() -> int:
    """Return the bytes at the end of the heap that could be returned; 0 where the C library does not report it."""
    info = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if info is None:
        return 0
    info.restype = _MallInfo
    return int(info().keepcost)


def usable_memory(process: Path = Path("/proc/self"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this process may use: the machine's memory, or the limit of its control group.

    Args:
        process: This process's folder of the proc file system.
        groups: Mount point of control groups.
    """
    limits = [int(psutil.virtual_memory().total)]
    for folder in control_groups("memory", process, groups):
        limits += [limit for name in _LIMITS if (limit := _number(folder / name)) is not None]
    return min(limits)


def available_memory(process: Path = Path("/proc/self"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this process and others of its control group may still take. Arguments as above."""
    free = [int(psutil.virtual_memory().available)]
    for folder in control_groups("memory", process, groups):
        for limit_name, used_name in zip(_LIMITS, _USES, strict=True):
            limit, used = _number(folder / limit_name), _number(folder / used_name)
            if limit is not None and used is not None:
                free.append(max(0, limit - used + _reclaimable(folder)))
    return min(free)


def limit_before_kill_mib(process: Path = Path("/proc/self"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return nine tenths of the memory if the kernel ends all processes of the control group when it runs out, else 0.

    Kubernetes sets `memory.oom.group` for containers under cgroup v2. Arguments as above.
    """
    is_group = any(_number(folder / "memory.oom.group") == 1 for folder in control_groups("memory", process, groups))
    return usable_memory(process, groups) * 9 // 10 // 2**20 if is_group else 0


_LIMITS = ("memory.max", "memory.limit_in_bytes")
_USES = ("memory.current", "memory.usage_in_bytes")


def _number(path: Path) -> int | None:
    """Return the number in a file; None if the file does not exist, or says "max"."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _reclaimable(folder: Path) -> int:
    """Return the bytes of files in the memory of a control group, which the system reclaims when memory is short."""
    try:
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))


def memory_of(pids: Iterable[int], limit: int) -> dict[int, int]:
    """Return the memory of processes and their descendants in bytes, by the number of the process.

    Pages that several processes map are shared out among them (PSS). That takes the system long to find out for large
    processes, so it is only asked where the resident memory, which counts such pages once for each, is above the limit.
    """
    trees = {pid: _tree(pid) for pid in pids}
    sizes = {pid: sum(map(_resident, tree)) for pid, tree in trees.items()}
    if sum(sizes.values()) > limit:
        sizes = {pid: sum(map(_proportional, tree)) for pid, tree in trees.items()}
    return sizes


def tree_bytes(pid: int | None = None) -> int:
    """Return the resident memory of a process, None for this one, and of all its descendants. Takes a few ms."""
    return sum(map(_resident, _tree(pid)))


async def exceeded(limit_mib: int) -> int:
    """Return the memory of this process and its descendants, in MiB, as soon as it exceeds the limit; never for 0."""
    own, limit, used = os.getpid(), limit_mib * 2**20, 0
    while not limit or used <= limit:
        await asyncio.sleep(MEMORY_S)
        used = (await asyncio.to_thread(memory_of, [own], limit))[own] if limit else 0
    return used // 2**20


def _tree(pid: int | None) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:  # it has ended
        return []


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def _proportional(process: psutil.Process) -> int:
    """Return the proportional set size, or the resident one where the system does not report it."""
    try:
        return int(process.memory_full_info().pss)
    except (psutil.Error, AttributeError):
        return _resident(process)
