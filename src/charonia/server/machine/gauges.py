"""Gauges of the machine and of this process, read for the metrics page."""

from time import monotonic_ns

import psutil

from charonia.server.metrics.prometheus import MachineGauges


class MachineSampler:
    """Reads the gauges at most once an interval; in between, it returns the last reading.

    Args:
        interval_ms: Shortest time between two readings, in ms.
    """

    def __init__(self, interval_ms: int) -> None:
        self._interval_ns = interval_ms * 1_000_000
        self._process = psutil.Process()
        self._last: MachineGauges | None = None
        self._last_ns = 0
        psutil.cpu_percent(None)  # the first reading only starts the measurement

    def sample(self) -> MachineGauges:
        """Return the machine's gauges."""
        now = monotonic_ns()
        if self._last is None or now - self._last_ns >= self._interval_ns:
            memory = psutil.virtual_memory()
            self._last = MachineGauges(
                cpu_utilization=psutil.cpu_percent(None) / 100,
                memory_total_bytes=memory.total,
                memory_used_bytes=memory.total - memory.available,
                process_memory_bytes=self._process.memory_info().rss,
            )
            self._last_ns = now
        return self._last


def process_usage(pid: int) -> tuple[float, int] | None:
    """Return the CPU time of a process in seconds and its resident memory in bytes; None if it has ended."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            return times.user + times.system, int(process.memory_info().rss)
    except psutil.Error:
        return None
