"""Whether a workload fits onto a machine: cores, GPUs, memory. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from charonia.platform.targets.api import Workload

MIB = 2**20

ENGINE_BYTES = 200 * MIB
"""Memory of a server without its models."""

WEIGHTS_FACTOR = 1.2
"""Memory of a model beyond the size of its files, if the deployment sets no limit."""

IDLE_CORES_MIN = 0.5
"""Idle cores required before one more server helps the existing ones."""


@dataclass(frozen=True, slots=True)
class LocalGpu:
    """A GPU, or a slice of one (MIG).

    Attributes:
        total_bytes: Its memory, 0 if NVIDIA's management library does not report it.
        cuda: How CUDA_VISIBLE_DEVICES names it: "0", or "MIG-..." for a slice.
    """

    name: str = ""
    total_bytes: int = 0
    free_bytes: int = 0
    cuda: str = ""


@dataclass(frozen=True, slots=True)
class LocalMachine:
    """Resources of a machine.

    Attributes:
        gpus: In the order of their numbers. A GPU that is divided counts as its slices.
        idle_cores: Cores that were idle recently; None if unknown.
    """

    cores: int
    available_bytes: int
    gpus: Sequence[LocalGpu] = ()
    idle_cores: float | None = None


@dataclass(frozen=True, slots=True)
class Needs:
    """Resources of one server.

    Attributes:
        gpu_bytes: Memory of each of them, 0 if not specified.
    """

    memory_bytes: int
    gpus: Sequence[int] = ()
    gpu_bytes: int = 0


def needs_of(workload: Workload) -> Needs:
    """Return the resources of a server of a workload, estimated from the size of its files if not specified."""
    spec = workload.spec
    estimate = ENGINE_BYTES + round(WEIGHTS_FACTOR * sum(model.size for model in workload.models))
    return Needs(spec.device.memory_mib * MIB or estimate, spec.device.gpus, spec.device.gpu_memory_mib * MIB)


def misfits(workload: Workload, machine: LocalMachine, promised: Sequence[Needs], running: int = 0) -> Iterator[str]:
    """Yield why a workload does not fit, a sentence each.

    Args:
        promised: Resources of each server of the other deployments.
        running: Existing servers of this deployment. They are upgraded one after the other, so at most one extra engine
            runs at a time.
    """
    spec, needs = workload.spec, needs_of(workload)
    more = max(1, spec.replicas.min - running)
    if spec.device.cpu_cores > machine.cores:
        yield f"device.cpu_cores: this machine has {machine.cores}, got {spec.device.cpu_cores}"
    count = len(machine.gpus)
    missing = [number for number in spec.device.gpus if number >= count]
    if missing:
        has = f"GPUs 0 to {count - 1}" if count > 1 else "GPU 0" if count else "no GPU"
        yield f"device.gpus: this machine has {has}, got {', '.join(map(str, missing))}"
    elif len(spec.device.gpus) > 1 and any(machine.gpus[number].cuda.startswith("MIG") for number in spec.device.gpus):
        yield "device.gpus: a server uses one slice of a GPU (MIG) at most: expected one number"
    if spec.device.gpu_memory_mib and not spec.device.gpus:
        yield "device.gpu_memory_mib: expected device.gpus, too"
    elif (
        spec.device.gpu_memory_mib
        and not missing
        and not all(machine.gpus[number].total_bytes for number in spec.device.gpus)
    ):
        yield (
            "device.gpu_memory_mib: the memory of this machine's GPUs is not known: this needs an NVIDIA driver and "
            "charonia[gpu] in the platform's Python"
        )
    if needs.memory_bytes * more > machine.available_bytes:
        said = "may use" if spec.device.memory_mib else "needs about"
        yield (
            f"memory: {_servers(more)} {said} {needs.memory_bytes / MIB:.0f} MiB, besides what runs now, and "
            f"{machine.available_bytes / MIB:.0f} MiB are free on this machine"
        )
    yield from _gpu_misfits(needs, more, machine, promised)


def obstacle(needs: Needs, more: int, machine: LocalMachine, promised: Sequence[Needs]) -> str:
    """Return why a machine has no room for `more` servers while others run, "" if it has room.

    `promised` lists the resources of the servers of all deployments.
    """
    if machine.idle_cores is not None and machine.idle_cores < IDLE_CORES_MIN:
        return f"{machine.idle_cores:.1f} of {machine.cores} cores are idle, and one more server would need them"
    if needs.memory_bytes * more > machine.available_bytes:
        return (
            f"it needs {needs.memory_bytes * more / MIB:.0f} MiB of memory, and "
            f"{machine.available_bytes / MIB:.0f} MiB are free"
        )
    return next(_gpu_misfits(needs, more, machine, promised), "")


def _gpu_misfits(needs: Needs, more: int, machine: LocalMachine, promised: Sequence[Needs]) -> Iterator[str]:
    for number in needs.gpus:
        if needs.gpu_bytes and number < len(machine.gpus) and (gpu := machine.gpus[number]).total_bytes:
            others = sum(one.gpu_bytes for one in promised if number in one.gpus)
            room = max(0, min(gpu.free_bytes, gpu.total_bytes - others))
            if needs.gpu_bytes * more > room:
                yield (
                    f"device.gpu_memory_mib: {_servers(more)} may use {needs.gpu_bytes / MIB:.0f} MiB of GPU {number}, "
                    f"and {room / MIB:.0f} MiB are left: {gpu.free_bytes / MIB:.0f} of {gpu.total_bytes / MIB:.0f} MiB "
                    f"are free, and {others / MIB:.0f} MiB were promised to others"
                )


def _servers(count: int) -> str:
    return "it" if count == 1 else f"each of {count} servers"
