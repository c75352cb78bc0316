"""Whether the machine has room for one more instance of a model, and which threads it gets. Pure.

An instance helps only where something is idle that it could use. While one computes on the CPU, that is a core; while
instances wait for something else, such as a GPU, a disk or another server, the cores are idle, too. So a core that
the server may use and nothing uses is the room, whatever the instances do.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from charonia.core.statistics import MemoryUsage, WorkerState

CORE_ROOM = 0.5
"""Idle cores, at least, for one more instance."""

MEMORY_KEPT = 0.05
"""Share of a memory that stays free."""

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """A memory that instances use.

    Attributes:
        name: Its name in messages.
        free: Free bytes.
        kept: Bytes of it that stay free.
        gpu: Number of the GPU, None for memory of the machine.
    """

    name: str
    free: int
    kept: int
    gpu: int | None = None


@dataclass(frozen=True, slots=True)
class Room:
    """The free capacity of the machine.

    Attributes:
        cores: Cores that the server may use.
        idle_cores: The idle ones among them.
    """

    cores: int
    idle_cores: float = 0.0
    memories: tuple[FreeMemory, ...] = ()


@dataclass(frozen=True, slots=True)
class Demand:
    """What one more instance of a model takes.

    Attributes:
        memory: Bytes of the machine's memory.
        gpu: Number of its GPU, None for an instance on the CPU.
        gpu_memory: Bytes of the memory of that GPU.
        on_event_loop: Whether instances compute on the event loop, which is one thread.
        resources: Resources of the rate limiter that instances wait for now.
    """

    memory: int = 0
    gpu: int | None = None
    gpu_memory: int = 0
    on_event_loop: bool = False
    resources: tuple[str, ...] = ()


def demand_of(
    usages: Sequence[MemoryUsage], workers: Sequence[WorkerState], gpu: int | None, resources: tuple[str, ...] = ()
) -> Demand:
    """Return the demand of one more instance, estimated from the largest existing one.

    Args:
        usages: FreeMemory that the model has reported; what instances share is there already.
        workers: The worker processes of its instances, none where it computes in the server.
        gpu: Number of the GPU of its instances, None for the CPU.
        resources: Resources of the rate limiter that instances wait for.
    """
    own = [usage for usage in usages if usage.instance]
    cpu = [usage.byte_size for usage in own if usage.type == "CPU"] + [worker.memory_bytes for worker in workers]
    on_gpu = [usage.byte_size for usage in own if usage.type == "GPU" and usage.id == gpu]
    return Demand(max(cpu, default=0), gpu, max(on_gpu, default=0), resources=resources)


def obstacle(room: Room, demand: Demand) -> str:
    """Return the obstacle to one more instance, "" for none."""
    if demand.on_event_loop:
        return "the model computes on the event loop, which all instances share"
    if demand.resources:
        return f"its instances wait for {', '.join(demand.resources)} of the rate limiter"
    if room.idle_cores < CORE_ROOM:
        return f"{room.idle_cores:.1f} of {room.cores} cores are idle"
    for memory in room.memories:
        if memory.gpu is not None and memory.gpu != demand.gpu:
            continue
        needed = demand.memory if memory.gpu is None else demand.gpu_memory
        if memory.free - needed < memory.kept:
            takes = f"another one takes about {-(-needed // _MIB):,} MiB of {memory.name}"
            return f"{takes}, of which {max(0, memory.free - memory.kept) // _MIB:,} MiB may be taken"
    return ""


def threads_of(idle_cores: float, threads: int) -> int:
    """Return the threads of one more instance: one for each idle core, at most as many as the first ones have."""
    return max(1, min(threads, int(idle_cores)))


def idle_cores(budget: int, machine: int, own: float, others: float) -> float:
    """Return the cores of the budget that nothing uses.

    Args:
        budget: Cores that the server may use.
        own: Cores that the server and its workers use.
        others: Cores that everything else uses. Those outside of the budget come first.
    """
    return max(0.0, budget - own - max(0.0, others - max(0, machine - budget)))
