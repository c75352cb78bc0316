"""Whether executions of a blocking instance may run on the event loop, decided from measured times."""

IN_PLACE_NS_MAX = 100_000
"""An execution at most this long may run on the event loop: about what a hand-over to a thread and back costs."""

IN_PLACE_PROBES = 8
"""Executions in a row that must have been that short before the loop runs them itself."""

IN_PLACE_RETRY_MAX = 4096
"""Most executions in the thread after the loop was held up, before running in place is tried again."""

FORGIVEN_AFTER = 1000
"""Executions on the loop after which one that holds it up is taken for the system's doing, which has given the core to
somebody else, and not for the model's."""

FORGIVEN_NS_MAX = 10_000_000
"""A longer hold-up is never forgiven."""

WAITS_MAX = 2
"""Hold-ups in which the model waited for something, each within `FORGIVEN_AFTER` executions on the loop: then it runs
there again only after `IN_PLACE_RETRY_MAX` executions in the thread in which it computed more than it waited."""

HELD_UP_NS = 10 * IN_PLACE_NS_MAX
"""A longer execution on the loop holds it up."""


class InPlaceRule:
    """Decides from measured times whether the next execution may run on the event loop.

    In the thread, an execution waits for the interpreter whenever the loop has it. So what counts there is how long the
    thread computes, and that at least one execution was as short by the clock: of a model that waits for something,
    such as a GPU, none is.

    One that waits only sometimes passes. Whether it waited when the loop was held up, or the system took the core away,
    is looked at while `is_watched`: until `FORGIVEN_AFTER` executions on the loop in a row were short. So a model that
    waits more than it computes holds up the loop `WAITS_MAX` times, and stays in the thread.

    Args:
        is_bound: Whether the instance has cores of its own, which are not the loop's: it never may.

    Attributes:
        in_place: Whether it may.
        is_watched: Whether executions on the loop are to be told to `ran_watched`.
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
        self._short = 0  # executions in a row that computed for a short time
        self._least_ns = HELD_UP_NS  # the shortest of them by the clock
        self._wanted = IN_PLACE_PROBES
        self._ran = 0  # executions on the loop since it was held up
        self._waits = 0  # hold-ups in which the model waited
        self._balance_ns = 0  # what the executions in a row computed, less what those waited that hold the loop up
        self.is_watched = True

    def ran_in_place(self, duration_ns: int) -> None:
        """Take in the duration of an execution on the loop."""
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
        """The same, with whether the thread of the loop waited for something meanwhile."""
        self.ran_in_place(duration_ns)
        if self._ran >= FORGIVEN_AFTER:
            self.is_watched = False
            self._waits = 0
        elif has_waited and duration_ns > HELD_UP_NS:
            self._waits += 1
            if self._waits >= WAITS_MAX:
                self._wanted = IN_PLACE_RETRY_MAX

    def ran_in_thread(self, duration_ns: int, cpu_ns: int) -> None:
        """Take in how long an execution in the thread took by the clock, and how long the thread computed."""
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
