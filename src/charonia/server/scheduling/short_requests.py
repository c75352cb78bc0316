"""Decides from executions in a thread whether a request is short, though a batch may not be. Pure.

A front end in a process of its own may run a model in place if its requests are short: the other way, to the engine,
costs each of them about as much as a handover to a thread. In the engine, requests of all front ends meet in batches,
and those may be long. So there is an account like that of `in_place.py`, with the same limits, for each request of a
batch.
"""

from charonia.server.scheduling.in_place import IN_PLACE_NS_MAX, OWED_NS_MAX, OWED_NS_TOLERATED, PROBES


class ShortRequests:
    """An account of requests.

    Attributes:
        are_short: Whether they are.
    """

    __slots__ = ("_owed_ns", "are_short")

    def __init__(self) -> None:
        self.are_short = False
        self._owed_ns = PROBES * IN_PLACE_NS_MAX

    def ran(self, requests: int, duration_ns: int, cpu_ns: int) -> None:
        """Take in the wall-clock time and the CPU time of a batch of so many requests."""
        short_ns = requests * IN_PLACE_NS_MAX
        self._owed_ns = min(max(self._owed_ns + cpu_ns - short_ns, 0), OWED_NS_MAX)
        if not self._owed_ns and duration_ns <= short_ns:  # one that waits has little CPU time
            self.are_short = True
        elif self._owed_ns > OWED_NS_TOLERATED:
            self.are_short = False
