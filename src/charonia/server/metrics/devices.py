"""Metrics of GPUs and of the memory that models take. Names and units of `nv_gpu_*` are Triton's. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from charonia.server.metrics.metric_families import Family, family
from charonia.server.metrics.prometheus import ModelSample

PINNED_BYTES = 256 * 1024 * 1024
"""Default limit of pinned memory."""


@dataclass(frozen=True, slots=True)
class GpuGauges:
    """The gauges of a GPU. None where it does not report one.

    Attributes:
        uuid: Its identity.
        utilization: Share of the last interval in which it computed, 0 to 1.
        memory_used_bytes: Memory in use, by all processes.
        power_watts: Power draw.
        energy_joules: Energy used since the server started.
    """

    uuid: str
    utilization: float | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    energy_joules: float | None = None


@dataclass(slots=True)
class MemoryAccount:
    """Account of memory that is kept in blocks.

    Attributes:
        used_bytes: Bytes in use.
        idle_bytes: Bytes that are kept for the next batch.
    """

    limit_bytes: int
    used_bytes: int = 0
    idle_bytes: int = 0


@dataclass(slots=True)
class PinnedMemory(MemoryAccount):
    """Account of pinned memory, the host memory that GPUs copy from and to."""

    limit_bytes: int = PINNED_BYTES


_GPU: tuple[tuple[str, str, str, Callable[[GpuGauges], float | None]], ...] = (
    ("nv_gpu_utilization", "gauge", "Share of time in which the GPU computed, 0 to 1", lambda g: g.utilization),
    ("nv_gpu_memory_total_bytes", "gauge", "Memory of the GPU", lambda g: g.memory_total_bytes),
    ("nv_gpu_memory_used_bytes", "gauge", "Memory of the GPU in use", lambda g: g.memory_used_bytes),
    ("nv_gpu_power_usage", "gauge", "Power that the GPU takes, in watts", lambda g: g.power_watts),
    ("nv_gpu_power_limit", "gauge", "Most power that the GPU may take, in watts", lambda g: g.power_limit_watts),
    ("nv_energy_consumption", "counter", "Energy since the server started, in joules", lambda g: g.energy_joules),
)


_PINNED = (
    ("nv_pinned_memory_pool_total_bytes", "Most pinned memory"),
    ("nv_pinned_memory_pool_used_bytes", "Pinned memory in use"),
)
_POOL: tuple[tuple[str, str, Callable[[MemoryAccount], int]], ...] = (
    (
        "charonia_gpu_pool_limit_bytes",
        "Most memory of a GPU that is kept in blocks for batches",
        lambda a: a.limit_bytes,
    ),
    ("charonia_gpu_pool_used_bytes", "The part that batches use", lambda a: a.used_bytes),
    ("charonia_gpu_pool_idle_bytes", "The part that is kept for the next batch", lambda a: a.idle_bytes),
)
_MODEL = "charonia_model_memory_bytes"


def device_metric_names() -> tuple[str, ...]:
    return (*(name for name, _, _, _ in _GPU), *(name for name, _ in _PINNED), *(name for name, _, _ in _POOL), _MODEL)


def gpu_families(gpus: Sequence[GpuGauges]) -> list[Family]:
    """Return the metrics of GPUs; a metric that cannot be read has no value."""
    return [
        family(name, kind, text, *((value, {"gpu_uuid": g.uuid}) for g in gpus if (value := read(g)) is not None))
        for name, kind, text, read in _GPU
        if gpus
    ]


def pinned_families(memory: PinnedMemory) -> list[Family]:
    """Return the metrics of pinned memory."""
    values = (memory.limit_bytes, memory.used_bytes)
    return [family(name, "gauge", text, (value, {})) for (name, text), value in zip(_PINNED, values, strict=True)]


def gpu_pool_families(pools: Mapping[int, MemoryAccount]) -> list[Family]:
    """Return the metrics of the blocks of memory of GPUs, by number of the GPU."""
    return [
        family(name, "gauge", text, *((read(a), {"device": str(gpu)}) for gpu, a in pools.items()))
        for name, text, read in _POOL
        if pools
    ]


def memory_families(models: Iterable[ModelSample]) -> list[Family]:
    """Return the memory that model versions take on each device, by instance where each has its own."""
    values = [
        (
            float(usage.byte_size),
            {
                **sample.metrics.labels(sample.tags),
                "type": usage.type,
                "device": str(usage.id),
                "model_instance": usage.instance,
            },
        )
        for sample in models
        for usage in sample.metrics.statistics.memory
    ]
    text = "Memory that the weights of a model version take on a device"
    return [family(_MODEL, "gauge", text, *values)] if values else []
