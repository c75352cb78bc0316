"""A scheduler under observation: its rules are checked after each event.

After each event the scheduler's own invariants are checked, and the rules of all schedulers (see
`server.scheduling.api`):

1. A submitted id leaves exactly once: in a `Run`, in a `Drop`, or by its own `Cancel`. One that is rescheduled leaves
   once more.
2. A slot gets work only after its `SlotIdle`, and at most one `Run` until the next.
3. `queued` is the number of ids that have not left.
"""

from collections import deque

from charonia.server.scheduling.api import (
    EMPTY_ROW,
    Cancel,
    Command,
    Drop,
    Event,
    Reschedule,
    Run,
    Scheduler,
    SlotIdle,
    SlotRemoved,
    Submit,
)

NOTED_STEPS = 20
"""Number of last steps that are added as a note to an exception of the scheduler."""


class RecordedScheduler:
    """A wrapper that adds checks to any scheduler."""

    def __init__(self, inner: Scheduler) -> None:
        self._inner = inner
        self._steps: deque[tuple[int, Event, list[Command]]] = deque(maxlen=NOTED_STEPS)
        self._queued: set[int] = set()
        self._running: dict[int, tuple[int, ...]] = {}  # ids by slot
        self._again: set[int] = set()  # running ids that are rescheduled
        self._idle: set[int] = set()

    @property
    def queued(self) -> int:
        return self._inner.queued

    def wake_at(self) -> int | None:
        return self._inner.wake_at()

    def handle(self, event: Event, now_ns: int) -> list[Command]:
        """Take in one event at this monotonic time and return what follows from it, in order.

        Raises:
            AssertionError: A rule is broken. The message has the last steps.
        """
        try:
            commands = self._inner.handle(event, now_ns)
        except Exception as error:
            error.add_note(f"{event} came after {list(self._steps)}")
            raise
        self._steps.append((now_ns, event, commands))
        self._take_in(event)
        for command in commands:
            if isinstance(command, Drop):
                self._leaves(command.id)
            else:
                self._runs(command)
        if isinstance(event, Cancel):  # unless it timed out at the same moment and has its `Drop`
            self._queued.discard(event.id)
        self.check_invariants()
        return commands

    def check_invariants(self) -> None:
        self._inner.check_invariants()
        assert self._inner.queued == len(self._queued), f"{self._inner!r} has other requests than {self._queued}"

    def _take_in(self, event: Event) -> None:
        match event:
            case Submit():
                self._queued.add(event.id)
            case Cancel():
                self._again.discard(event.id)
            case Reschedule():
                self._again.add(event.id)
            case SlotIdle() | SlotRemoved():
                back = self._again.intersection(self._running.pop(event.slot, ()))
                self._queued |= back
                self._again -= back
                self._idle.discard(event.slot)
                if isinstance(event, SlotIdle):
                    self._idle.add(event.slot)

    def _leaves(self, id: int) -> None:
        assert id in self._queued, f"request {id} left although it did not wait: {list(self._steps)}"
        self._queued.remove(id)

    def _runs(self, run: Run) -> None:
        assert run.slot in self._idle, f"slot {run.slot} was handed a batch while it was not idle: {run}"
        self._idle.remove(run.slot)
        self._running[run.slot] = tuple(each for each in run.ids if each != EMPTY_ROW or each in self._queued)
        for each in self._running[run.slot]:
            self._leaves(each)
