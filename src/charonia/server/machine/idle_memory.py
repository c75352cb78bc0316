"""When to give memory back to the operating system that a burst has left free. Pure.

Freed memory is kept for the next requests (`memory.keep_freed_memory`), because getting it anew costs them time. After
a burst it would be kept for ever, so it is given back once, when the load has been low for some seconds.
"""

QUIET_S = 5
"""Seconds of low load after which memory is given back."""

BUSY_CPU_S = 0.1
"""CPU time of a second from which on it counts as load."""

LOW_SHARE = 0.05
"""A second is quiet if it takes at most this share of the CPU time of the busiest one since memory was given back."""


class IdleMemory:
    """Tells when memory is to be given back."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._busiest_s = 0.0
        self._quiet = 0

    def second_passed(self, cpu_s: float) -> bool:
        """Note the CPU time of the process so far, each second; return whether to give memory back now."""
        used_s, self._total_s = cpu_s - self._total_s, cpu_s
        self._busiest_s = max(self._busiest_s, used_s)
        is_quiet = self._busiest_s >= BUSY_CPU_S and used_s <= self._busiest_s * LOW_SHARE
        self._quiet = self._quiet + 1 if is_quiet else 0
        if self._quiet < QUIET_S:
            return False
        self._busiest_s = 0.0
        self._quiet = 0
        return True
