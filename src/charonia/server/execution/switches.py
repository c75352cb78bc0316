"""Whether this thread slept, or had its core taken away: what the clock alone cannot tell apart."""

import sys

Switches = tuple[int, int]
"""How often this thread gave its core away because it waited for something, and how often it was taken away."""

if sys.platform == "linux":
    import resource

    def switches() -> Switches:
        """Return the counts of the thread that asks, since it began. Costs about a microsecond."""
        usage = resource.getrusage(resource.RUSAGE_THREAD)
        return usage.ru_nvcsw, usage.ru_nivcsw

else:

    def switches() -> Switches:
        """Return nothing: this system does not count them by thread."""
        return 0, 0


def has_waited(since: Switches) -> bool:
    """Return whether this thread has waited since more often than its core was taken away."""
    waited, taken = switches()
    return waited - since[0] > taken - since[1]
