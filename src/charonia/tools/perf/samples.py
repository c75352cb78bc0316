"""Requests that ended, as rows of numbers: what processes that send load tell the one that measures.

A row is made for every request on the hot path, so it is ten plain integers; names are given to them here.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]
"""Requests that ended, int64 [requests, WIDTH]; times are monotonic nanoseconds."""

INTENDED, SENT, SEND_END, FIRST, RECEIVE, DONE, OUTCOME, RESPONSES, PLACE, SEQUENCE = range(10)
"""Columns.

INTENDED: when it was meant to be sent. SENT: when it was. SEND_END: when its last byte was handed over, 0 for never.
FIRST: when its first response was complete, 0 for none. RECEIVE: duration from first to last byte of its responses.
DONE: when its last response was complete, or its failure known. OUTCOME: 0 for success, else the number of the kind of
error. RESPONSES: how many there were. PLACE: see `place`. SEQUENCE: see `sequence_mark`.
"""
WIDTH = 10


def place(stream: int, step: int) -> int:
    """Return stream and step of the input data in one number."""
    return stream << 32 | step


def sequence_mark(sequence_id: int, end: bool) -> int:
    """Return a correlation id and whether the sequence ends, in one number."""
    return sequence_id << 1 | end


def no_rows() -> Rows:
    """Return no requests."""
    return np.empty((0, WIDTH), np.int64)


def as_rows(numbers: bytes) -> Rows:
    """Return the rows whose numbers stand one after the other."""
    return np.frombuffer(numbers, np.int64).reshape(-1, WIDTH)


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one process tells, every few hundredths of a second.

    Attributes:
        until_ns: Every request that ended before is in this chunk or an earlier one.
        rows: Requests that ended, as the bytes of `Rows`.
        sent: Open loop: intended and actual send time of every request sent, as the bytes of int64 [requests, 2].
        in_flight: Requests without an answer.
        cpu_ns: CPU time of the process so far.
        kinds: Kinds of errors that are new, by number.
        messages: Messages of errors, each with the number of its kind.
        responses: Times of all responses of requests that had several, by the number of the row; only if wanted.
        finished: Whether all there was to send was sent and has ended.
    """

    until_ns: int
    rows: bytes
    sent: bytes
    in_flight: int
    cpu_ns: int
    kinds: dict[int, str] = field(default_factory=dict)
    messages: tuple[tuple[int, str], ...] = ()
    responses: dict[int, tuple[int, ...]] = field(default_factory=dict)
    finished: bool = False


def successes(rows: Rows) -> Rows:
    """Return the requests that succeeded."""
    good: Rows = rows[rows[:, OUTCOME] == 0]
    return good


def response_times(rows: Rows) -> Rows:
    """Return the time of each from its intended send, in nanoseconds."""
    times: Rows = rows[:, DONE] - rows[:, INTENDED]
    return times


def service_times(rows: Rows) -> Rows:
    """Return the time of each from its actual send, in nanoseconds."""
    times: Rows = rows[:, DONE] - rows[:, SENT]
    return times


def ended_within(rows: Rows, begin_ns: int, end_ns: int) -> Rows:
    """Return the requests that ended in [begin_ns, end_ns)."""
    return rows[(rows[:, DONE] >= begin_ns) & (rows[:, DONE] < end_ns)]


def joined(parts: Iterable[Rows]) -> Rows:
    """Return the rows of all parts, by the time they ended."""
    rows = np.concatenate([no_rows(), *parts])
    ordered: Rows = rows[np.argsort(rows[:, DONE], kind="stable")]
    return ordered
