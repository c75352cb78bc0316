"""Whether a workload fits onto a machine: cores, GPUs, memory. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from charonia.platform.targets.api import Workload

MIB = 2**20

ENGINE_BYTES = 200 * MIB
"""Memory of a server without its models."""

WEIGHTS_FACTOR = 1.2
"""Memory of a model beside the size of its files, where a deployment does not say how much it may use."""


@dataclass(frozen=True, slots=True)
class LocalMachine:
    """What a machine has.

    Attributes:
        cores: CPU cores.
        available_bytes: Memory that is not in use.
        gpus: Number of GPUs.
    """

    cores: int
    available_bytes: int
    gpus: int = 0


def needed_bytes(workload: Workload) -> int:
    """Return the memory that a workload needs: what it may use, or an estimate from the size of its files."""
    if workload.spec.memory_mib:
        return workload.spec.memory_mib * MIB
    return ENGINE_BYTES + round(WEIGHTS_FACTOR * sum(model.size for model in workload.models))


def misfits(workload: Workload, machine: LocalMachine) -> Iterator[str]:
    """Yield why a workload does not fit, a sentence each."""
    spec = workload.spec
    if (spec.replicas_min, spec.replicas_max) != (1, 1):
        yield (
            f"replicas: expected 1 on one machine, got {spec.replicas_min} to {spec.replicas_max}: "
            "more 'instances' and 'cpu_cores' serve more requests there"
        )
    if spec.cpu_cores > machine.cores:
        yield f"device.cpu_cores: this machine has {machine.cores}, got {spec.cpu_cores}"
    missing = [number for number in spec.gpus if number >= machine.gpus]
    if missing:
        has = f"GPUs 0 to {machine.gpus - 1}" if machine.gpus > 1 else "GPU 0" if machine.gpus else "no GPU"
        yield f"device.gpus: this machine has {has}, got {', '.join(map(str, missing))}"
    needed = needed_bytes(workload)
    if needed > machine.available_bytes:
        said = "it may use" if spec.memory_mib else "it needs about"
        yield (
            f"memory: {said} {needed / MIB:.0f} MiB, beside what runs now, and "
            f"{machine.available_bytes / MIB:.0f} MiB are free on this machine"
        )
