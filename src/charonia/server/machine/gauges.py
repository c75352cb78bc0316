"""Gauges of the machine and of this process, read for the metrics page."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic_ns
from typing import Generic, TypeVar

import psutil

from charonia.server.metrics.prometheus import MachineGauges

T = TypeVar("T")


class GaugeReader(Generic[T]):
    """Reads something at most once an interval; in between, it returns the last reading."""

    def __init__(self, read: Callable[[], T], interval_ms: int, clock: Callable[[], int] = monotonic_ns) -> None:
        self._read = read
        self._interval_ns = interval_ms * 1_000_000
        self._clock = clock
        self._last: T | None = None
        self._last_ns = 0

    def sample(self) -> T:
        now = self._clock()
        if self._last is None or now - self._last_ns >= self._interval_ns:
            self._last, self._last_ns = self._read(), now
        return self._last


def machine_sampler(interval_ms: int) -> GaugeReader[MachineGauges]:
    """Return what reads the gauges of the machine and of this process."""
    process = psutil.Process()
    psutil.cpu_percent(None)  # the first reading only starts the measurement

    def read() -> MachineGauges:
        memory = psutil.virtual_memory()
        return MachineGauges(
            cpu_utilization=psutil.cpu_percent(None) / 100,
            memory_total_bytes=memory.total,
            memory_used_bytes=memory.total - memory.available,
            process_memory_bytes=process.memory_info().rss,
        )

    return GaugeReader(read, interval_ms)


def process_usage(pid: int) -> tuple[float, int] | None:
    """Return the CPU time of a process in seconds and its resident memory in bytes; None if it has ended."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            return times.user + times.system, int(process.memory_info().rss)
    except psutil.Error:
        return None


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """CPU time so far, in seconds of all cores of the machine together.

    Attributes:
        idle_s: Time that nothing ran.
        busy_s: Time that programs ran, or would have run had the hypervisor not taken the core.
        own_s: Time of this server and the workers of its models.
    """

    idle_s: float
    busy_s: float
    own_s: float

    @classmethod
    def read(cls, workers_s: float) -> "CpuTimes":
        """Return the current times, given the workers' times."""
        times = psutil.cpu_times()
        idle_s = float(times.idle + getattr(times, "iowait", 0.0))
        # Guests are part of `user`.
        all_s = float(sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0))
        return cls(idle_s, all_s - idle_s, time.process_time() + workers_s)

    def since(self, before: "CpuTimes", seconds: float) -> tuple[float, float]:
        """Return the idle cores, and the cores used by other programs, since an earlier reading."""
        if seconds <= 0:
            return 0.0, 0.0
        return max(0.0, self.idle_s - before.idle_s) / seconds, self.used_since(before, seconds)[1]

    def used_since(self, before: "CpuTimes", seconds: float) -> tuple[float, float]:
        """Return the cores used by this server, and by other programs, since an earlier reading."""
        own_s = max(0.0, self.own_s - before.own_s)  # less if a worker has ended
        others_s = max(0.0, self.busy_s - before.busy_s - own_s)
        return own_s / seconds, others_s / seconds
