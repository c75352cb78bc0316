"""The events, the commands and the interface of a model's scheduler. Pure.

Rules of every scheduler:

1. `handle` is the only method that changes state; the caller passes the time.
2. Every submitted id leaves exactly once: in a `Run`, in a `Drop`, or by its own `Cancel`.
3. A slot gets work only after `SlotIdle`, and then at most one `Run` until its next `SlotIdle`.
4. `wake_at` is the time of the next timeout; the caller then sends `Tick`. An early `Tick` changes nothing.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple, Protocol

from charonia.core.request import NO_FLOW, Flow

_NS_PER_MS: Final = 1_000_000

EMPTY_ROW: Final = 0
"""The id in `Run.ids` of a row of the batch without a request. No request has this id."""


class Submit(NamedTuple):
    """A request arrives.

    Attributes:
        id: Never used before in this scheduler.
        batch_size: Batch elements of the request, at least 1.
        shape_key: Requests share a batch only if their keys are equal.
        priority: Requested priority level, 0 for the default.
        timeout_us: Requested queue timeout in microseconds, 0 for none.
        flow: Its client, with which others share the model fairly.
        deadline_ns: Monotonic time after which its client no longer waits, in ns; 0 if that is unknown.
    """

    id: int
    batch_size: int = 1
    shape_key: Hashable = None
    priority: int = 0
    timeout_us: int = 0
    flow: Flow = NO_FLOW
    deadline_ns: int = 0


class Cancel(NamedTuple):
    """The caller of a request has gone. Ignored for ids that are not queued (already running, dropped or unknown)."""

    id: int


class SlotIdle(NamedTuple):
    """A slot can take a batch. See `server.scheduling.slots`.

    Attributes:
        instance: Its instance, which may have several slots.
    """

    slot: int
    instance: int = 0


class SlotRemoved(NamedTuple):
    """A slot no longer accepts batches (its instance has less capacity, its process died, the model is unloaded).

    Its running batch, if any, has already left the scheduler; the caller answers its requests.
    """

    slot: int


class Tick(NamedTuple):
    """Time passed."""


class Stop(NamedTuple):
    """No new requests: every later `Submit` is dropped with `STOPPING`; those queued still run, without delay."""


class Reschedule(NamedTuple):
    """A running request has to run again when its slot is idle. For schedulers of sequences.

    Attributes:
        id: The request.
    """

    id: int


class SetStateKey(NamedTuple):
    """The states of a sequence with a running request have new shapes.

    Attributes:
        sequence: Number of the sequence.
        key: Requests of two sequences share a batch only if these keys are equal.
    """

    sequence: int
    key: Hashable


class StopNewSequences(NamedTuple):
    """No new sequences: a later request that starts one is dropped with `STOPPING`; live sequences may continue."""


class StateLost(NamedTuple):
    """The instance of a slot has lost the state of its sequences: they cannot continue."""

    slot: int


class RowTaken(NamedTuple):
    """A sequence of another scheduler that shares the instance has a row, which is taken here until `RowFree`."""

    slot: int
    row: int


class RowFree(NamedTuple):
    """A row that was taken is this scheduler's."""

    slot: int
    row: int


SequenceEvent = Reschedule | SetStateKey | StopNewSequences | StateLost | RowTaken | RowFree
"""Events for schedulers of sequences only; others ignore them."""

Event = Submit | Cancel | SlotIdle | SlotRemoved | Tick | Stop | SequenceEvent


class CloseReason(Enum):
    """Why a batch was sent."""

    FULL = "full"
    PREFERRED = "preferred"
    DELAY = "delay"
    QUEUE_EMPTY = "queue_empty"
    SHAPE = "shape"
    STRATEGY = "strategy"


class DropReason(Enum):
    """Why a request was dropped."""

    QUEUE_FULL = "queue_full"
    OVERLOADED = "overloaded"
    TIMEOUT = "timeout"
    STOPPING = "stopping"
    STRATEGY_FAILED = "strategy_failed"
    SCHEDULER_FAILED = "scheduler_failed"
    NO_SEQUENCE = "no_sequence"
    SEQUENCE_TIMEOUT = "sequence_timeout"
    STATE_LOST = "state_lost"
    CANCELLED = "cancelled"


class Run(NamedTuple):
    """Run these requests, in this order, on this slot."""

    slot: int
    ids: tuple[int, ...]
    reason: CloseReason


class Drop(NamedTuple):
    """Reject this request."""

    id: int
    reason: DropReason


Command = Run | Drop


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Policy of one priority level's queue.

    Attributes:
        size_max: Most requests that wait; a request that starts immediately never counts. 0 for no limit.
        timeout_ns: Default queue timeout in ns, 0 for none.
        timeout_override: Whether a request may set a shorter timeout (or one at all, if there is no default).
        delay_expired: Move an expired request behind all others instead of dropping it.
        adapts: Under overload, refuse requests that would wait longer than clients do (see `Overload`).
    """

    size_max: int = 0
    timeout_ns: int = 0
    timeout_override: bool = False
    delay_expired: bool = False
    adapts: bool = False


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """Policy of the dynamic batcher.

    Attributes:
        size_max: Most batch elements in a batch, at least 1.
        preferred_sizes: Sizes that are sent without waiting for the delay.
        delay_ns: Longest time that a request waits for others to join, in ns.
        priority_levels: Number of levels, 0 for one queue without levels. Level 1 is the most urgent.
        default_level: Level of requests without, or with an unknown, priority.
        limits: Queue policy of levels that have none in `level_limits`.
        level_limits: Queue policy by level.
        adapt_delay: Skip the delay when recent batches show that no other request is expected (see `ClosedLoop`).
        wanted_size: The largest preferred size: a batch of at least this number of elements does not wait for more.
    """

    size_max: int = 1
    preferred_sizes: tuple[int, ...] = ()
    delay_ns: int = 0
    priority_levels: int = 0
    default_level: int = 0
    limits: QueueLimits = QueueLimits()
    level_limits: tuple[tuple[int, QueueLimits], ...] = ()
    adapt_delay: bool = True

    wanted_size: int = field(init=False)

    def __post_init__(self) -> None:
        largest = max(self.preferred_sizes, default=self.size_max)
        object.__setattr__(self, "wanted_size", min(self.size_max, largest))


class Scheduler(Protocol):
    """Decides which requests run together, where and when."""

    def handle(self, event: Event, now_ns: int) -> list[Command]:
        """Take in one event at this monotonic time and return what follows from it, in order."""

    def wake_at(self) -> int | None:
        """Return the monotonic time in ns at which to send a `Tick`, or None."""

    @property
    def queued(self) -> int:
        """Number of requests that wait."""

    def check_invariants(self) -> None:
        """Raise an AssertionError where the state contradicts itself. For tests, after every event."""


def state_line(scheduler: Scheduler, slots: object, now_ns: int) -> str:
    """Return the state of a scheduler in one line, for its `repr`.

    Args:
        slots: Its slots; shown by `str`.
        now_ns: When it had its last event.
    """
    wake_ns = scheduler.wake_at()
    wake = "no timer" if wake_ns is None else f"wake at {(wake_ns - now_ns) / _NS_PER_MS:+.1f} ms"
    return f"<{type(scheduler).__name__} [queued {scheduler.queued} | {slots} | {wake}]>"
