"""The CPU time of the machine and of this server: what is idle, and who uses the rest."""

import time
from dataclasses import dataclass

import psutil


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
        """Return the times as they are now, given those of the workers."""
        times = psutil.cpu_times()
        idle_s = float(times.idle + getattr(times, "iowait", 0.0))
        # Guests are part of `user`.
        all_s = float(sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0))
        return cls(idle_s, all_s - idle_s, time.process_time() + workers_s)

    def since(self, before: "CpuTimes", seconds: float) -> tuple[float, float]:
        """Return the cores that were idle, and those that others than this server took, since an earlier reading."""
        if seconds <= 0:
            return 0.0, 0.0
        return max(0.0, self.idle_s - before.idle_s) / seconds, self.used_since(before, seconds)[1]

    def used_since(self, before: "CpuTimes", seconds: float) -> tuple[float, float]:
        """Return the cores that this server used, and those that others did, since an earlier reading."""
        own_s = max(0.0, self.own_s - before.own_s)  # less if a worker has ended
        others_s = max(0.0, self.busy_s - before.busy_s - own_s)
        return own_s / seconds, others_s / seconds
