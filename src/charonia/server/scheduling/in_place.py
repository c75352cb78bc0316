"""Decides from measured times whether executions of a blocking instance run in place, on the event loop. Pure.

In place, an execution saves the cost of handing it to a thread and back, and holds up the loop while it lasts. The rule
keeps an account: a long execution adds its time to the *debt* of the model, and a short one pays back `IN_PLACE_NS_MAX`
of it. A model begins to run in place when it owes nothing, and returns to the thread when it owes more than
`OWED_NS_TOLERATED`; in between nothing changes. So a single outlier changes nothing, and a model
that has become slow leaves soon.

1. In the thread, the CPU time counts: an execution waits there for the GIL whenever the loop holds it. One execution
   must be short in wall-clock time, too: a model that waits, for a GPU for example, has little CPU time.
2. In place, an execution may take long because the system has pre-empted the thread, which the model cannot help. So
   executions are *watched*: their CPU time counts, unless the thread waited. Watching has its price, and ends after
   `WATCHED` executions without a long one. The next long one is unexplained: it is free, but watching begins again.
3. A model that waits only sometimes passes the test in the thread. When it has waited `WAITS_MAX` times while it was
   watched, it runs in place only after `WAITS_FORGOTTEN` executions in which it computed more than it waited.
4. On a slow or crowded machine both take longer, executions and handing them over. So a model that takes up to
   `TRIED_NS_MAX` in the thread is tried in place, and stays if it takes less there than handing over costs. After each
   trial it takes twice as many executions until the next one.

A front end in a separate process may run a model in place if its requests are short: passing one to the engine costs
about as much as handing it to a thread. In the engine, requests of all front ends meet in batches, which may be long.
So `ShortRequests` keeps the same kind of account, with the same limits, of each request's share of a batch.
"""

from typing import Final

from charonia.core.native import mypyc_attr

IN_PLACE_NS_MAX: Final = 100_000
"""Longest execution in the thread that is short: about the cost of handing it over and back."""

HELD_UP_NS: Final = 2 * IN_PLACE_NS_MAX
"""The same in place: more than in the thread, so that a model between the two stays where it is."""

PROBES: Final = 8
"""Short executions with which a new model begins to run in place."""

OWED_NS_TOLERATED: Final = 20_000_000
"""A model that owes more runs in the thread."""

OWED_NS_MAX: Final = 2 * OWED_NS_TOLERATED
"""No model owes more, so that some hundred short executions always make up for what was."""

WATCHED: Final = 1000
"""Executions in place without a long one after which they are no longer watched."""

UNEXPLAINED_NS_MAX: Final = 100_000_000
"""An execution that was not watched and took longer counts in full, whatever the reason."""

WAIT_NS_MIN: Final = 1_000_000
"""A shorter execution that waited has perhaps waited for the GIL only."""

WAITS_MAX: Final = 2
"""Executions that waited in place, while watched, after which the model is one that waits."""

WAITS_FORGOTTEN: Final = 4096
"""Executions in the thread over which a model that waits is judged."""

TRIED_NS_MAX: Final = 4 * IN_PLACE_NS_MAX
"""Longest execution in the thread of a model that is tried in place."""

HANDING_OVER: Final = 3
"""CPU time of handing an execution over and back, as a multiple of the thread's share of it."""

TRIAL: Final = 8
"""Executions in place of a trial."""

TRIAL_MISSES_MAX: Final = 2
"""Executions of a trial that may be too long. One that is longer than `TRIED_NS_MAX` ends it."""

PAUSE_MIN: Final = 32
"""Executions of at most `TRIED_NS_MAX` in the thread before the first trial."""

PAUSE_MAX: Final = 4096
"""The same before a later one."""


@mypyc_attr(allow_interpreted_subclasses=True)
class InPlaceRule:
    """Decides whether the next execution runs in place.

    Args:
        is_bound: Whether the instance is bound to cores other than the loop's, so that it never runs in place.

    Attributes:
        in_place: Whether the next execution runs in place.
        is_watched: Whether to measure the CPU time of executions in place, and whether they waited.
        is_tried: Whether the executions in place belong to a trial.
        counts_requests: Whether the reported times of a batch in place are the share of each of its requests.
    """

    __slots__ = (
        "_balance_ns", "_is_bound", "_judged", "_least_ns", "_misses", "_owed_ns", "_passed_on_ns", "_pause",
        "_quiet", "_tried", "_until_trial", "_waits", "counts_requests", "in_place", "is_tried", "is_watched",
    )  # fmt: skip

    def __init__(self, *, is_bound: bool = False) -> None:
        self.in_place = False
        self.is_watched = True
        self.is_tried = False
        self.counts_requests = False
        self._is_bound = is_bound
        self._owed_ns = PROBES * IN_PLACE_NS_MAX
        self._least_ns = HELD_UP_NS  # the shortest wall-clock time in the thread
        self._quiet = 0  # executions in place since the last long one
        self._waits = 0  # executions in place that waited
        self._judged = 0  # executions in the thread of a model that waits,
        self._balance_ns = 0  # and their CPU time less their waiting time
        self._pause = self._until_trial = PAUSE_MIN  # executions from one trial to the next, and until the next one
        self._tried = 0  # executions of the trial
        self._misses = 0  # executions of the trial that were too long
        self._passed_on_ns = 0  # CPU time that the thread spends on getting and reporting an execution, on average

    def begin(self) -> None:
        """Run in place from now on, judged by the time of a request: another process has measured that it is short."""
        self.counts_requests = True
        if not self._is_bound:
            self._enter()
            self._owed_ns = self._waits = 0

    def ran_in_place(self, duration_ns: int, cpu_ns: int, *, has_waited: bool = False) -> None:
        """Take in an execution in place.

        Args:
            duration_ns: Its wall-clock time.
            cpu_ns: Its CPU time, if it was watched.
            has_waited: Whether it waited, if it was watched.
        """
        if has_waited and duration_ns >= WAIT_NS_MIN:
            self._waits += 1
        if self.is_tried:
            self._judge(cpu_ns if duration_ns > HELD_UP_NS and not has_waited else duration_ns)
            return
        if duration_ns <= HELD_UP_NS:
            self._owed_ns = max(self._owed_ns - IN_PLACE_NS_MAX, 0)
            if self.is_watched:
                self._quiet += 1
                if self._quiet >= WATCHED:
                    self.is_watched = False
                    self._waits = 0
            return
        self._quiet = 0
        if self.is_watched:
            took_ns = duration_ns if has_waited else cpu_ns
        else:
            took_ns = duration_ns if duration_ns > UNEXPLAINED_NS_MAX else 0
            self.is_watched = True
        if took_ns > HELD_UP_NS:
            self._owed_ns = min(self._owed_ns + took_ns, OWED_NS_MAX)
        if self._owed_ns > OWED_NS_TOLERATED or self._waits >= WAITS_MAX:
            self._leave()

    def ran_in_thread(self, duration_ns: int, cpu_ns: int, passed_on_ns: int = 0) -> None:
        """Take in an execution in the thread.

        Args:
            duration_ns: Its wall-clock time.
            cpu_ns: Its CPU time.
            passed_on_ns: CPU time of the thread since the execution before it.
        """
        self._passed_on_ns += (min(passed_on_ns, HELD_UP_NS) - self._passed_on_ns) // 8
        self._least_ns = min(self._least_ns, duration_ns)
        if cpu_ns > IN_PLACE_NS_MAX:
            self._owed_ns = min(self._owed_ns + cpu_ns, OWED_NS_MAX)
        else:
            self._owed_ns = max(self._owed_ns - IN_PLACE_NS_MAX, 0)
        if self._waits >= WAITS_MAX and not self._waits_no_longer(duration_ns, cpu_ns):
            return
        if self._is_bound:
            return
        if not self._owed_ns and self._least_ns <= IN_PLACE_NS_MAX:
            self._enter()
        elif cpu_ns > TRIED_NS_MAX:
            self._until_trial = min(self._until_trial + cpu_ns // TRIED_NS_MAX, 2 * self._pause)
        elif duration_ns <= TRIED_NS_MAX:
            self._until_trial -= 1
            if not self._until_trial:
                self._enter()
                self.is_tried = True
                self._tried = self._misses = 0
                self._pause = self._until_trial = min(2 * self._pause, PAUSE_MAX)

    def _enter(self) -> None:
        self.in_place = self.is_watched = True
        self._quiet = 0

    def _leave(self) -> None:
        self.in_place = self.is_tried = False
        self._least_ns = HELD_UP_NS
        self._judged = self._balance_ns = 0

    def _judge(self, took_ns: int) -> None:
        """Take in an execution of a trial."""
        self._tried += 1
        self._misses += took_ns > max(IN_PLACE_NS_MAX, min(HANDING_OVER * self._passed_on_ns, HELD_UP_NS))
        if took_ns > TRIED_NS_MAX or self._misses > TRIAL_MISSES_MAX:
            self._leave()
        elif self._tried == TRIAL:
            self.is_tried = False
            self._owed_ns = 0

    def _waits_no_longer(self, duration_ns: int, cpu_ns: int) -> bool:
        """Executions in a row by which to judge a model that waits."""
        self._judged += 1
        self._balance_ns += cpu_ns if duration_ns < WAIT_NS_MIN else 2 * cpu_ns - duration_ns
        if self._judged < WAITS_FORGOTTEN:
            return False
        has_computed = self._balance_ns >= 0
        self._judged = self._balance_ns = 0
        if has_computed:
            self._waits = WAITS_MAX - 1
        return has_computed


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
