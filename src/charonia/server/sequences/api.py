"""What a sequence scheduler is told and shows beyond `server.scheduling.api`. Pure."""

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

SequenceKey = int | str
"""Correlation id of a sequence. A number and a text never mean the same sequence."""


class SequenceMember(NamedTuple):
    """Which part of which sequence a request is; comes as `Submit.shape_key`.

    Attributes:
        key: Correlation id.
        start: Whether it begins a sequence.
        end: Whether nothing follows it.
        shape_key: Requests of several sequences share a batch only if their keys are equal.
    """

    key: SequenceKey
    start: bool = False
    end: bool = False
    shape_key: Hashable = None


class EndReason(Enum):
    """Why a sequence is over."""

    ENDED = "ended"
    IDLE = "idle"
    CANCELLED = "cancelled"
    REPLACED = "replaced"
    DROPPED = "dropped"
    STOPPED = "stopped"


class SequenceEnd(NamedTuple):
    """A sequence is over.

    Attributes:
        sequence: Its number.
        key: Its correlation id.
        reason: Why.
    """

    sequence: int
    key: SequenceKey
    reason: EndReason


class BatchRow(NamedTuple):
    """Where a request stands that runs.

    Attributes:
        sequence: Number of its sequence, never used twice.
        is_first: Whether it is the first execution of the sequence.
    """

    sequence: int
    is_first: bool


@dataclass(frozen=True, slots=True)
class SequencePolicy:
    """Policy of a sequence scheduler.

    Attributes:
        idle_ns: How long a sequence that has a slot may have no request before it is ended, in ns.
        rows: Slots for sequences that each instance has, at least 1.
        size_max: Most requests in a batch, at least 1. With `keeps_rows` as many as there are rows.
        keeps_rows: The direct strategy: a sequence is always in the same row of the batch.
        preferred_sizes: Of the oldest strategy: sizes that are sent without waiting for the delay.
        delay_ns: Longest time that a request waits for others to join, in ns.
        utilization_min: Of the direct strategy: share of the rows that have a request from which on there is no
            waiting for the delay. 0 for no waiting at all.
        queue_max: Most requests that wait, in all sequences.
        adapt_delay: Skip the delay when every sequence of the instance has a request.
        state_key: What a new sequence shares a batch by, besides the shapes of its requests.
    """

    idle_ns: int
    rows: int = 1
    size_max: int = 1
    keeps_rows: bool = True
    preferred_sizes: tuple[int, ...] = ()
    delay_ns: int = 0
    utilization_min: float = 0.0
    queue_max: int = 0
    adapt_delay: bool = True
    state_key: Hashable = None


class SequenceView(NamedTuple):
    """A sequence as somebody sees it who looks at the server.

    Attributes:
        key: Correlation id.
        row: Its slot in the instance, None for one that waits for a slot.
        queued: Its requests that wait.
        is_running: Whether one runs.
        quiet_ns: Time for which it has had no request and nothing that runs, or has waited for a slot.
        requests: Its requests that have run or run now.
    """

    key: SequenceKey
    row: int | None
    queued: int
    is_running: bool
    quiet_ns: int
    requests: int


class SequencerView(NamedTuple):
    """The slots and the backlog.

    Attributes:
        rows: Slots of each instance.
        instances: The sequences that have a slot, by instance, in the order of slots.
        backlog: The sequences that wait for a slot, first the one that gets the next.
        ended: How many sequences are over, by reason.
    """

    rows: int
    instances: tuple[tuple[SequenceView, ...], ...]
    backlog: tuple[SequenceView, ...]
    ended: tuple[tuple[EndReason, int], ...]
