"""When to give back to the operating system the memory that a burst has left free. Pure.

Freed memory is kept for the next requests (`memory.keep_freed_memory`), because getting it anew costs them time. After
a burst it would be kept for ever, so it is given back when the load has been low for some seconds: in steps, so that a
burst that follows soon finds most of it.
"""

QUIET_S = 5
"""Seconds of low load before each step."""

STEPS = 4
"""Number of equal parts in which memory is given back."""

BUSY_CPU_S = 0.1
"""CPU time that makes a second count as load."""

LOW_SHARE = 0.05
"""A second is quiet if it takes at most this share of the CPU time of the busiest one since the last step."""


class IdleMemory:
    """Tells when memory is to be given back, and how much of it."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._busiest_s = 0.0
        self._quiet = 0
        self._steps_left = STEPS

    def second_passed(self, cpu_s: float) -> float | None:
        """Take in the CPU time of the process so far; to be called every second.

        Returns:
            The share of the free memory to keep if some is to be given back now, 0 in the last step; None otherwise.
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
