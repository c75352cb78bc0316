"""Decides from executions in a thread whether a request is short, even if a batch is not. Pure.

A front end in a process of its own may run a model in place if its requests are short: passing one to
the engine costs about as much as handing it to a thread. In the engine, requests of all front ends meet in batches,
which may be long. So this keeps an account like that of `in_place.py`, with the same limits, of each request's share of
a batch.
"""

from charonia.server.scheduling.in_place import IN_PLACE_NS_MAX, OWED_NS_MAX, OWED_NS_TOLERATED, PROBES


class ShortRequests:
    """An account of the time that requests take.

    Attributes:
        are_short: Whether requests are short.
    """

    __slots__ = ("_owed_ns", "are_short")

    def __init__(self) -> None:
        self.are_short = False
        self._owed_ns = PROBES * IN_PLACE_NS_MAX

    def ran(self, requests: int, duration_ns: int, cpu_ns: int) -> None:
        """Take in the number of requests of a batch, its wall-clock time and its CPU time."""
        short_ns = requests * IN_PLACE_NS_MAX
        self._owed_ns = min(max(self._owed_ns + cpu_ns - short_ns, 0), OWED_NS_MAX)
        if not self._owed_ns and duration_ns <= short_ns:  # one that waits has little CPU time
            self.are_short = True
        elif self._owed_ns > OWED_NS_TOLERATED:
            self.are_short = False
