"""The policy and the records of sequence schedulers, in addition to `server.scheduling.api`. Pure."""

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

SequenceKey = int | str
"""Correlation id of a sequence. An integer and a string never denote the same sequence."""


class SequenceMember(NamedTuple):
    """The place of a request in its sequence; passed as `Submit.shape_key`.

    Attributes:
        key: Correlation id.
        start: Whether it starts a sequence.
        end: Whether it ends the sequence.
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
    LOST = "lost"


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
    """The sequence of a running request.

    Attributes:
        sequence: Number of the sequence, never used twice.
        is_first: Whether this is the first execution of the sequence.
    """

    sequence: int
    is_first: bool


@dataclass(frozen=True, slots=True)
class SequencePolicy:
    """Policy of a sequence scheduler.

    Attributes:
        idle_ns: Time without requests after which a sequence with a slot is ended, in ns.
        rows: Slots for sequences of each instance, at least 1.
        size_max: Most requests in a batch, at least 1. With `keeps_rows` the number of rows.
        keeps_rows: The direct strategy: a sequence is always in the same row of the batch.
        preferred_sizes: For the oldest strategy: sizes that are sent without waiting for the delay.
        delay_ns: Longest time that a request waits for others to join, in ns.
        utilization_min: For the direct strategy: share of rows with a request that makes a batch leave without waiting
            for the delay. 0 for no waiting at all.
        queue_max: Most requests that wait, in all sequences.
        adapts: Under overload, refuse new sequences that would wait for a slot longer than clients do.
        adapt_delay: Skip the delay when every sequence of the instance has a request.
        state_key: Batch key of a new sequence's states, in addition to the shapes of its requests.
    """

    idle_ns: int
    rows: int = 1
    size_max: int = 1
    keeps_rows: bool = True
    preferred_sizes: tuple[int, ...] = ()
    delay_ns: int = 0
    utilization_min: float = 0.0
    queue_max: int = 0
    adapts: bool = False
    adapt_delay: bool = True
    state_key: Hashable = None


class SequenceView(NamedTuple):
    """A sequence, for display.

    Attributes:
        key: Correlation id.
        row: Its slot in the instance, None while it waits for one.
        queued: Number of its waiting requests.
        is_running: Whether one of its requests runs.
        quiet_ns: Time since it last had a request, or since it began to wait for a slot.
        requests: Number of its requests that were executed, including a running one.
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
        instances: The sequences with a slot, by instance, in order of slots.
        backlog: The sequences that wait for a slot, in order.
        ended: Number of ended sequences by reason.
    """

    rows: int
    instances: tuple[tuple[SequenceView, ...], ...]
    backlog: tuple[SequenceView, ...]
    ended: tuple[tuple[EndReason, int], ...]
