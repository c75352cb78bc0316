"""What the server's processes have at a time, and what they may not have when no client is left."""

import gc
import io
import mmap
import os
import re
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, CodeType, ModuleType
from typing import Any

from tests.simulation.machine import MACHINE, PROCESS, SimulatedLoop, Thread
from tests.simulation.network import End
from tests.simulation.processes import LOCKED
from tests.simulation.workers import WORKERS

from charonia.core.request import InferRequest
from charonia.core.response import InferResponse
from charonia.server.channel.end import ChannelEnd, TensorLink
from charonia.server.channel.regions import RegionPool
from charonia.server.ensembles.call import EnsembleCall, StepCall
from charonia.server.execution.in_flight import PendingRequest, RunningBatch
from charonia.server.front_ends.link import Link
from charonia.server.front_ends.reconnect import Reconnect
from charonia.server.grpc.calls import GrpcCall
from charonia.server.grpc.connection import GrpcConnection
from charonia.server.grpc.streams import InferStream
from charonia.server.http.connection import HttpConnection
from charonia.server.http.exchange import Exchange
from charonia.server.lifecycle.on_demand import DeferredRequest
from charonia.server.response_cache.memory import LruEntries
from charonia.server.response_cache.runner import CachedCall
from charonia.server.scheduling.dynamic import ClosedLoop
from charonia.server.traffic.canary import VersionFigures
from charonia.server.traffic.split import Shadowing

PER_REQUEST = (
    CachedCall, DeferredRequest, EnsembleCall, Exchange, GrpcCall, GrpcConnection, HttpConnection, InferRequest,
    InferResponse, InferStream, PendingRequest, RunningBatch, StepCall,
)  # fmt: skip
"""Objects that go with their request, or with its connection."""

ACCOUNTS: dict[type, tuple[str, ...]] = {
    ChannelEnd: ("unsent_bytes",),
    ClosedLoop: ("_inside", "_running"),
    Reconnect: ("_held", "_held_bytes"),
    Shadowing: ("count", "size_bytes"),
    VersionFigures: ("in_flight",),
}
"""What is 0, or empty, without requests."""

FILES_OF_WORKER = {"pipe:": 4, "socket:": 4}
"""Descriptors of a worker process, at both ends."""

POOLED = ("/memfd:charonia (deleted)", "mapped /memfd:charonia (deleted)")
"""Shared memory of channels, which their ends keep for reuse."""

RECORDS = ("changes", "hand_over", "requests")
"""Files of the server that changes and upgrades write, one of each."""

STAGED = "charonia-files-"
"""Beginning of the names of folders with files that came with a load request; each is open, too."""

KEPT = "files-"
"""Beginning of the names of folders with such files for the next engine."""

_NO_TIMERS = r"_set_result_unless_cancelled|Timeout\._on_timeout|End\."
"""Timers of tasks, and of the network."""


def _is_server(process: str | None) -> bool:
    return process not in (None, "clients", "world", *MACHINE.dead)


def tasks(loop: SimulatedLoop) -> Counter[str]:
    found = [(process, task) for task, process in loop.process_of.items() if not task.done()]
    return Counter(
        f"task {task.get_coro().__qualname__} of {process}"  # type: ignore[union-attr]
        for process, task in found
        if _is_server(process)
    )


def timers(loop: SimulatedLoop) -> Counter[str]:
    """Return the timers besides those of tasks."""
    handles: list[Any] = [handle for *_, handle in loop._timers if not handle.cancelled()]
    found = [(_name(handle._callback), handle._context.get(PROCESS)) for handle in handles]
    return Counter(
        f"timer {name} of {process}"
        for name, process in found
        if _is_server(process) and not re.match(_NO_TIMERS, name)
    )


def _name(callback: Any) -> str:
    while isinstance(callback, partial):
        callback = callback.func
    return str(getattr(callback, "__qualname__", callback))


Objects = Mapping[int, Any]
"""Objects by id."""


def of_ended(loop: SimulatedLoop, living: list[object]) -> Objects:
    """Return what processes have that have ended: killed ones leave it in the memory of the simulation.

    Args:
        living: Objects beyond which nothing belongs to them.
    """
    borders = {id(each) for each in (loop, MACHINE, *living, *map(vars, sys.modules.values()))}
    borders |= {id(task) for task, process in loop.process_of.items() if process not in MACHINE.dead}
    threads_ = [each for each in gc.get_objects() if type(each) is Thread and each.process in MACHINE.dead]
    found: dict[int, Any] = {}
    more: list[Any] = [*MACHINE.graveyard, *threads_]
    for each in threads_:
        frame = each.greenlet.gr_frame
        while frame is not None:
            more += frame.f_locals.values()
            frame = frame.f_back
    while more:
        following = []
        for each in more:
            number = id(each)
            if number in found or number in borders or isinstance(each, _SHARED):
                continue
            if isinstance(each, End) and each.process not in MACHINE.dead:
                continue
            found[number] = each
            following.append(each)
        more = gc.get_referents(*following)
    return found


_SHARED = (type, ModuleType, BuiltinFunctionType, CodeType, str, bytes, int, float)
"""Kinds of objects that no process has for itself."""

_NUMBERS = ("fd", "_fd", "_file", "pidfd")
"""Attributes with descriptors."""


def descriptors(objects: Objects) -> set[int]:
    """Return the descriptors of objects."""
    found = {
        each.fileno()
        for each in objects.values()
        if isinstance(each, (socket.socket, io.FileIO)) and not (isinstance(each, io.FileIO) and each.closed)
    }
    for each in objects.values():
        values = getattr(each, "__dict__", None) or {}
        found.update(values[name] for name in _NUMBERS if isinstance(values.get(name), int))
    return found


def files(ended: Objects | None = None) -> Counter[str]:
    """Return the open descriptors by kind or path, without those of workers, and the mapped memory objects.

    Args:
        ended: Objects whose descriptors and mappings do not count.
    """
    found: Counter[str] = Counter()
    left_out = descriptors(ended or {})
    locked = {each for process, folders in LOCKED.items() if process in MACHINE.dead for each in folders}
    maps = Counter(_size(each) for each in (ended or {}).values() if isinstance(each, mmap.mmap))
    mapped = dict(maps)
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}").partition("[")[0]
            status = os.stat(int(descriptor))
        except OSError:  # the one of the list
            continue
        if int(descriptor) in left_out or (int(descriptor), status.st_ino) in locked:
            continue
        if target.startswith("/") and maps[status.st_size] > 0:  # a map has its own descriptor
            maps[status.st_size] -= 1
            continue
        found[STAGED if STAGED in target else target] += 1
    for line in Path("/proc/self/maps").read_text().splitlines():
        name = line.split(maxsplit=5)[5:]
        found.update(f"mapped {each}" for each in name if each.startswith(("/memfd:", "/dev/shm/")))
    for memory in [each for each in found if each.startswith("mapped /dev/shm/")]:
        found[memory] -= mapped.get(os.stat(memory.split()[1]).st_size, 0)
    for worker in WORKERS.values():
        if worker.returncode is None:
            found.subtract(FILES_OF_WORKER)
    return +found


def links(ended: Objects) -> Counter[str]:
    """Return the ends of connections between processes, except those among these objects."""
    return Counter("end of a link" for each in gc.get_objects() if type(each) is Link and id(each) not in ended)


def paths(folder: Path) -> Counter[str]:
    """Return the server's own files, and temporary ones."""
    found = [each.relative_to(folder) for each in (folder / "private").rglob("*") if each.name not in RECORDS]
    own = [KEPT if each.name.startswith(KEPT) else str(each) for each in found if not each.parent.name.startswith(KEPT)]
    return Counter([*own, *(STAGED for _ in Path(tempfile.gettempdir()).iterdir())])


def _size(memory: mmap.mmap) -> int:
    return 0 if memory.closed else len(memory)


def by_role(names: Counter[str]) -> Counter[str]:
    """Return counts without the numbers of processes: others may have taken their places."""
    found: Counter[str] = Counter()
    for name, count in names.items():
        found[re.sub(r"(engine|front_end)[_0-9]*( \d+)?", r"\1", name)] += count
    return found


def kept(ended: Objects) -> list[str]:
    """Return what requests have left in memory, except in these objects. Garbage must have been collected."""
    requests: Counter[str] = Counter()
    problems = []
    named = dropped = 0  # references to shared memory of the other process, and those that it learns of next
    for each in gc.get_objects():
        kind = type(each)
        if id(each) in ended:
            continue
        if issubclass(kind, PER_REQUEST):
            requests[kind.__name__] += 1
        elif kind in ACCOUNTS:
            wrong = {name: getattr(each, name) for name in ACCOUNTS[kind]}
            problems += [f"{kind.__name__} has {name} {value}" for name, value in wrong.items() if value]
        elif kind is RegionPool:
            each._collect()
            named += sum(region.outs for region in each._used.values()) + len(each._forwarded)
            if held := sum(region.holds for region in each._used.values()):
                problems.append(f"{held} arrays lie in shared memory")
        elif issubclass(kind, TensorLink):
            dropped += len(each._released)
        elif kind is LruEntries:
            total = sum(size for _, size in each._entries.values())
            if each.byte_size != total or total > each.byte_size_max:
                problems.append(f"the cache counts {each.byte_size} of {each.byte_size_max} bytes, it has {total}")
    if named > dropped:
        problems.append(f"{named - dropped} references to shared memory of another process")
    return [*(f"{count} {kind}" for kind, count in sorted(requests.items())), *problems]


def threads() -> list[str]:
    return [
        f"thread {each.name} of {each.process}"
        for each in gc.get_objects()
        if type(each) is Thread and not each.is_over and _is_server(each.process)
    ]
