"""A scheduler under observation: a log of its events and commands, and checks of its rules after each event.

For tests and debugging; it costs nothing unless it is switched on. The log is a ring buffer of the last `limit` steps.
As a scheduler is a pure state machine, a complete log can be replayed: a new scheduler answers the same events with the
same commands.

After each event the scheduler's own invariants are checked, and the rules of all schedulers (see
`server.scheduling.api`):

1. A submitted id leaves exactly once: in a `Run`, in a `Drop`, or by its own `Cancel`. One that is rescheduled leaves
   once more.
2. A slot gets work only after its `SlotIdle`, and at most one `Run` until the next.
3. `queued` is the number of ids that have not left.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from charonia.server.scheduling.api import (
    EMPTY_ROW,
    Cancel,
    Command,
    Drop,
    Event,
    Reschedule,
    Run,
    Scheduler,
    SlotGone,
    SlotIdle,
    Submit,
)

STEPS_MAX = 10_000
"""Default number of steps in the log."""

NOTED_STEPS = 20
"""Number of last steps that are added as a note to an exception of the scheduler."""


class RecordedStep(NamedTuple):
    """One event and its commands.

    Attributes:
        at_ns: Time of the event.
        commands: The scheduler's answer.
    """

    at_ns: int
    event: Event
    commands: tuple[Command, ...]

    def concerns(self, id: int) -> bool:
        """Return whether a request is involved."""
        if isinstance(self.event, Submit | Cancel | Reschedule) and self.event.id == id:
            return True
        return any(id in (command.ids if isinstance(command, Run) else (command.id,)) for command in self.commands)


class RecordedScheduler:
    """A wrapper that adds a log and checks to any scheduler.

    Args:
        inner: The scheduler.
        limit: Most steps in the log.
    """

    def __init__(self, inner: Scheduler, limit: int = STEPS_MAX) -> None:
        self._inner = inner
        self._steps: deque[RecordedStep] = deque(maxlen=limit)
        self._queued: set[int] = set()
        self._running: dict[int, tuple[int, ...]] = {}  # ids by slot
        self._again: set[int] = set()  # running ids that are rescheduled
        self._idle: set[int] = set()

    def __repr__(self) -> str:
        return f"<RecordedScheduler [steps {len(self._steps)} | {self._inner!r}]>"

    @property
    def queued(self) -> int:
        return self._inner.queued

    @property
    def log(self) -> tuple[RecordedStep, ...]:
        """The last steps, oldest first."""
        return tuple(self._steps)

    def wake_at(self) -> int | None:
        return self._inner.wake_at()

    def handle(self, event: Event, now_ns: int) -> list[Command]:
        """Take in one event at this monotonic time and return what follows from it, in order.

        Raises:
            AssertionError: A rule is broken. The message has the history of the request, if it is about one.
        """
        try:
            commands = self._inner.handle(event, now_ns)
        except Exception as error:
            error.add_note(f"{event} came after {list(self._steps)[-NOTED_STEPS:]}")
            raise
        self._steps.append(RecordedStep(now_ns, event, tuple(commands)))
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

    def story(self, id: int) -> list[RecordedStep]:
        """Return the steps of the log in which a request is involved."""
        return [step for step in self._steps if step.concerns(id)]

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
            case SlotIdle() | SlotGone():
                back = self._again.intersection(self._running.pop(event.slot, ()))
                self._queued |= back
                self._again -= back
                self._idle.discard(event.slot)
                if isinstance(event, SlotIdle):
                    self._idle.add(event.slot)

    def _leaves(self, id: int) -> None:
        assert id in self._queued, f"request {id} left although it did not wait: {self.story(id)}"
        self._queued.remove(id)

    def _runs(self, run: Run) -> None:
        assert run.slot in self._idle, f"slot {run.slot} was handed a batch while it was not idle: {run}"
        self._idle.remove(run.slot)
        self._running[run.slot] = tuple(each for each in run.ids if each != EMPTY_ROW or each in self._queued)
        for each in self._running[run.slot]:
            self._leaves(each)


def replay(steps: Iterable[RecordedStep], scheduler: Scheduler) -> RecordedStep | None:
    """Send the events of a log to a new scheduler.

    Returns:
        The first step that it answers differently, with its own commands; None if there is none.
    """
    for step in steps:
        commands = tuple(scheduler.handle(step.event, step.at_ns))
        if commands != step.commands:
            return RecordedStep(step.at_ns, step.event, commands)
    return None
