"""Completed requests as rows of integers: the data that workers send to the measuring process. Pure.

The hot path makes a row for every request, so a row is ten plain integers; this module names the columns.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class ReceivedResponse:
    """The response to a request, as it came.

    Attributes:
        arrivals: int64 [parts, 2] as bytes: the monotonic time of each part, and the size of the body with it.
        body: The body; over gRPC, the messages one after the other, each of them a part.
    """

    arrivals: bytes
    body: bytes
    history: tuple[str, ...] = ()


Rows = NDArray[np.int64]
"""Completed requests, int64 [requests, WIDTH]; times are monotonic nanoseconds."""

INTENDED, SENT, SEND_END, FIRST, RECEIVE, DONE, OUTCOME, RESPONSES, PLACE, SEQUENCE = range(10)
"""Columns.

INTENDED: scheduled send time. SENT: actual send time. SEND_END: when its last byte was passed to the operating system,
0 for never. FIRST: when its first response was complete, 0 for none. RECEIVE: duration from first to last byte of its
responses. DONE: when its last response was complete, or it failed. OUTCOME: 0 for success, else the number of the kind
of error. RESPONSES: number of responses. PLACE: see `place`. SEQUENCE: see `sequence_mark`.
"""
WIDTH = 10


def place(stream: int, step: int) -> int:
    """Return stream and step of the input data as one number."""
    return stream << 32 | step


def sequence_mark(sequence_id: int, end: bool) -> int:
    """Return a correlation id and whether the sequence ends, as one number."""
    return sequence_id << 1 | end


def no_rows() -> Rows:
    return np.empty((0, WIDTH), np.int64)


def as_rows(numbers: bytes) -> Rows:
    """Return the rows in a buffer of their numbers."""
    return np.frombuffer(numbers, np.int64).reshape(-1, WIDTH)


@dataclass(frozen=True, slots=True)
class Chunk:
    """The report of one worker, sent every few hundredths of a second.

    Attributes:
        until_ns: This chunk and the previous ones hold every request that ended before this time.
        rows: Completed requests, as the bytes of `Rows`.
        busy_ns: CPU time of the worker so far, without polling.
        sent: Open loop: intended and actual send times of all sent requests, as the bytes of int64 [requests, 2].
        responses: Times of all responses by number of the row, if they are kept.
        replies: Responses of a language model by number of the row, undecoded.
        finished: Whether all requests were sent and have ended.
    """

    until_ns: int
    rows: bytes
    sent: bytes
    in_flight: int
    busy_ns: int
    kinds: dict[int, str] = field(default_factory=dict)
    messages: tuple[tuple[int, str], ...] = ()
    responses: dict[int, tuple[int, ...]] = field(default_factory=dict)
    replies: dict[int, ReceivedResponse] = field(default_factory=dict)
    finished: bool = False

    @property
    def row_count(self) -> int:
        return len(self.rows) // (8 * WIDTH)


def successes(rows: Rows) -> Rows:
    """Return the successful requests."""
    good: Rows = rows[rows[:, OUTCOME] == 0]
    return good


def response_times(rows: Rows) -> Rows:
    """Return the time from the intended send of each request, in nanoseconds."""
    times: Rows = rows[:, DONE] - rows[:, INTENDED]
    return times


def service_times(rows: Rows) -> Rows:
    """Return the time from the actual send of each request, in nanoseconds."""
    times: Rows = rows[:, DONE] - rows[:, SENT]
    return times


def ended_within(rows: Rows, begin_ns: int, end_ns: int) -> Rows:
    """Return the requests that ended in [begin_ns, end_ns)."""
    return rows[(rows[:, DONE] >= begin_ns) & (rows[:, DONE] < end_ns)]


def together(parts: Iterable[Rows]) -> Rows:
    """Return the rows of all parts, in their order; rows of language models have additional columns."""
    filled = [part for part in parts if len(part)]
    return np.concatenate(filled) if filled else no_rows()


def joined(parts: Iterable[Rows]) -> Rows:
    """Return the rows of all parts, by completion time."""
    rows = together(parts)
    done = rows[:, DONE]
    if np.all(done[:-1] <= done[1:]):  # usually true with one worker
        return rows
    ordered: Rows = rows[np.argsort(done, kind="stable")]
    return ordered
