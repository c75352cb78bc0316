"""Decides from measured times whether executions of a blocking instance run in place, on the event loop. Pure."""

IN_PLACE_NS_MAX = 100_000
"""Longest execution that may run on the event loop: about the cost of handing it to a thread and back."""

IN_PLACE_PROBES = 8
"""Executions in a row that must be that short before they run in place."""

IN_PLACE_RETRY_MAX = 4096
"""Most executions in the thread after one blocked the loop, before the next attempt in place."""

FORGIVEN_AFTER = 1000
"""Short executions in place after which a long one is blamed on the operating system, which has pre-empted the thread,
and not on the model."""

FORGIVEN_NS_MAX = 10_000_000
"""A longer execution is never forgiven."""

WAITS_MAX = 2
"""Executions that blocked the loop because the model waited, each within `FORGIVEN_AFTER` executions in place. After
them, the model runs in place only after `IN_PLACE_RETRY_MAX` executions in which it computed more than it waited."""

HELD_UP_NS = 10 * IN_PLACE_NS_MAX
"""A longer execution in place counts as blocking the loop."""


class InPlaceRule:
    """Decides from measured times whether the next execution runs in place.

    In the thread, an execution waits for the GIL whenever the loop holds it. So the CPU time counts there,
    and one execution must be as short in wall-clock time: a model that waits, for a GPU for example, has none.

    A model that waits only sometimes passes. While `is_watched`, until `FORGIVEN_AFTER` executions in place in a row
    were short, the rule distinguishes executions in which the model waited from those in which the thread was
    pre-empted. A model that waits more than it computes thus blocks the loop `WAITS_MAX` times and stays in the thread.

    Args:
        is_bound: Whether the instance is bound to cores other than the loop's, so that it never runs in place.

    Attributes:
        in_place: Whether the next execution runs in place.
        is_watched: Whether executions in place are reported to `ran_watched`.
    """

    __slots__ = (
        "_balance_ns",
        "_is_bound",
        "_least_ns",
        "_ran",
        "_short",
        "_waits",
        "_wanted",
        "in_place",
        "is_watched",
    )

    def __init__(self, *, is_bound: bool = False) -> None:
        self.in_place = False
        self._is_bound = is_bound
        self._short = 0  # executions in a row with a short CPU time
        self._least_ns = HELD_UP_NS  # the shortest wall-clock time of them
        self._wanted = IN_PLACE_PROBES
        self._ran = 0  # executions in place since the last that blocked the loop
        self._waits = 0  # executions that blocked the loop because the model waited
        self._balance_ns = 0  # CPU time of executions in a row, less the waiting time of long ones
        self.is_watched = True

    def ran_in_place(self, duration_ns: int) -> None:
        """Take in the duration of an execution in place."""
        self._ran += 1
        if duration_ns <= HELD_UP_NS:
            return
        if self._ran > FORGIVEN_AFTER and duration_ns <= FORGIVEN_NS_MAX:
            self._wanted = IN_PLACE_PROBES
        else:
            self.in_place = False
            self._wanted = min(2 * self._wanted, IN_PLACE_RETRY_MAX)
        self._ran = 0
        self.is_watched = True

    def ran_watched(self, duration_ns: int, *, has_waited: bool) -> None:
        """Take in the duration of an execution in place, and whether the thread waited during it."""
        self.ran_in_place(duration_ns)
        if self._ran >= FORGIVEN_AFTER:
            self.is_watched = False
            self._waits = 0
        elif has_waited and duration_ns > HELD_UP_NS:
            self._waits += 1
            if self._waits >= WAITS_MAX:
                self._wanted = IN_PLACE_RETRY_MAX

    def ran_in_thread(self, duration_ns: int, cpu_ns: int) -> None:
        """Take in the wall-clock time and the CPU time of an execution in the thread."""
        if cpu_ns > IN_PLACE_NS_MAX:
            self._begin_count()
            return
        self._short += 1
        self._least_ns = min(self._least_ns, duration_ns)
        self._balance_ns += cpu_ns if duration_ns <= HELD_UP_NS else 2 * cpu_ns - duration_ns
        if self._short < self._wanted or self._least_ns > IN_PLACE_NS_MAX or self._is_bound:
            return
        self.in_place = self._waits < WAITS_MAX or self._balance_ns >= 0
        self._begin_count()

    def _begin_count(self) -> None:
        self._short, self._least_ns, self._balance_ns = 0, HELD_UP_NS, 0
