"""Collects the workers' reports about a level."""

import time

import numpy as np

from charonia.tools.perf.language.replies import GARBLED, ReplyReader, Times, figures, fill, problem, widened
from charonia.tools.perf.samples import (
    DONE,
    OUTCOME,
    PLACE,
    SENT,
    SEQUENCE,
    Chunk,
    Rows,
    as_rows,
    joined,
    no_rows,
    response_times,
    successes,
)
from charonia.tools.results.language import LanguageFigures
from charonia.tools.results.records import ERROR_SAMPLES_MAX, ErrorKind, RequestRecord
from charonia.wire.answer import Failure

LOST_NS = 3_000_000_000
"""Time without a successful response, while connections fail, after which the server counts as lost."""

_LOST = frozenset((Failure.REFUSED.name, Failure.RESET.name))
_STEP_MASK = 2**32 - 1


class Ledger:
    """The requests of a level, from all workers.

    Args:
        keep_requests: Whether to keep a record of every request.
        replies: Decodes the responses of a language model, None for others.
    """

    def __init__(self, process_count: int, keep_requests: bool = False, replies: ReplyReader | None = None) -> None:
        self._until = [0] * process_count
        self._in_flight = [0] * process_count
        self._finished = [False] * process_count
        self._busy: list[list[tuple[int, int]]] = [[] for _ in range(process_count)]
        self._parts: list[Rows] = []
        self._sorted = no_rows()
        self._sent: list[Rows] = []
        self._kinds: dict[str, int] = {}
        self._numbers: list[dict[int, int]] = [{} for _ in range(process_count)]
        self._messages: dict[int, list[str]] = {}
        self._keep = keep_requests
        self._replies = replies
        self._gaps: list[tuple[int, Times]] = []
        self._to_epoch = time.time_ns() - time.monotonic_ns()
        self._requests: list[tuple[int, RequestRecord]] = []
        self.request_count = 0
        self.error_count = 0
        self.last_success_ns = 0
        self._lost_since_success = 0

    def take(self, process: int, chunk: Chunk) -> Rows:
        """Add the report of a worker, and return its rows."""
        numbers = self._numbers[process]
        for number, kind in chunk.kinds.items():
            numbers[number] = self._kinds.setdefault(kind, len(self._kinds) + 1)
        for number, message in chunk.messages:
            messages = self._messages.setdefault(numbers[number], [])
            if message not in messages:
                messages.append(message)
        rows = as_rows(chunk.rows)
        if np.any(rows[:, OUTCOME]):
            table = np.zeros(max(numbers) + 1, np.int64)
            for number, shared in numbers.items():
                table[number] = shared
            rows = rows.copy()
            rows[:, OUTCOME] = table[rows[:, OUTCOME]]
        if self._replies is not None:
            rows = self._with_tokens(rows, chunk, self._replies)
        self._count(rows)
        if len(rows):
            self._parts.append(rows)
        if chunk.sent:
            self._sent.append(np.frombuffer(chunk.sent, np.int64).reshape(-1, 2))
        if self._keep:
            self._remember(rows, chunk)
        self._until[process] = chunk.until_ns
        self._in_flight[process] = chunk.in_flight
        self._finished[process] = chunk.finished
        self._busy[process].append((chunk.until_ns, chunk.busy_ns))
        return rows

    @property
    def process_count(self) -> int:
        return len(self._until)

    @property
    def until_ns(self) -> int:
        """The ledger holds every request that ended before this time."""
        return min(self._until)

    @property
    def in_flight(self) -> int:
        return sum(self._in_flight)

    @property
    def is_finished(self) -> bool:
        """Whether all workers have sent their requests and have all answers."""
        return all(self._finished)

    @property
    def rows(self) -> Rows:
        """All completed requests, by completion time."""
        if self._parts:
            self._sorted = joined([self._sorted, *self._parts])
            self._parts = []
        return self._sorted

    @property
    def sent(self) -> Rows:
        """Scheduled and actual send times of the requests of an open loop, in scheduled order; int64 [requests, 2]."""
        if len(self._sent) > 1:
            whole = np.concatenate(self._sent)
            self._sent = [whole[np.argsort(whole[:, 0], kind="stable")]]
        return self._sent[0] if self._sent else np.empty((0, 2), np.int64)

    @property
    def may_be_lost(self) -> bool:
        """Whether connections have failed since the last success, so the server may be lost."""
        return self._lost_since_success > 0

    def is_lost(self, now_ns: int, begin_ns: int) -> bool:
        """Whether the server is lost: only failing connections for `LOST_NS`."""
        quiet = now_ns - max(self.last_success_ns, begin_ns)
        return self._lost_since_success > 0 and quiet > LOST_NS

    def errors(self, rows: Rows) -> tuple[ErrorKind, ...]:
        """Return the failures among these rows by kind, most frequent first."""
        counts = np.bincount(rows[:, OUTCOME], minlength=len(self._kinds) + 1)
        kinds = [
            ErrorKind(kind, int(counts[number]), tuple(self._messages.get(number, ())))
            for kind, number in self._kinds.items()
            if counts[number]
        ]
        return tuple(sorted(kinds, key=lambda kind: -kind.count))

    def busy_share(self, begin_ns: int, end_ns: int) -> tuple[float, float]:
        """Return the CPU utilisation of the busiest worker in an interval, and CPU seconds of all, without polling."""
        spent = [_spent(samples, begin_ns, end_ns) for samples in self._busy]
        share = max(spent, default=0) / max(end_ns - begin_ns, 1)
        return min(max(share, 0.0), 1.0), max(sum(spent), 0) / 1e9

    def requests(self, begin_ns: int, end_ns: int) -> tuple[RequestRecord, ...]:
        """Return the records of the requests that ended in [begin_ns, end_ns), if they are kept."""
        chosen = [(done, record) for done, record in self._requests if begin_ns <= done < end_ns]
        return tuple(record for _, record in sorted(chosen, key=lambda pair: pair[1].begin_ns))

    def figures(self, good: Rows, begin_ns: int, end_ns: int) -> LanguageFigures | None:
        """Return the figures of a language model, None for other models, or without a successful request.

        Args:
            end_ns: Its end, which is not part of it.
        """
        if self._replies is None or not len(good):
            return None
        gaps = [gaps for done_ns, gaps in self._gaps if begin_ns <= done_ns < end_ns]
        return figures(good, gaps, end_ns - begin_ns, self._replies)

    def epoch_ns(self, monotonic_ns: int) -> int:
        """Return a monotonic time as nanoseconds since the epoch."""
        return monotonic_ns + self._to_epoch

    def _count(self, rows: Rows) -> None:
        good = successes(rows)
        self.request_count += len(good)
        self.error_count += len(rows) - len(good)
        if len(good):
            self.last_success_ns = max(self.last_success_ns, int(good[:, DONE].max()))
            self._lost_since_success = 0
        elif len(rows):
            lost = [self._kinds[kind] for kind in _LOST if kind in self._kinds]
            self._lost_since_success += int(np.isin(rows[:, OUTCOME], lost).sum())

    def _with_tokens(self, rows: Rows, chunk: Chunk, replies: ReplyReader) -> Rows:
        """Return rows with the times and tokens of the responses in a report."""
        wide = widened(rows)
        for number, received in chunk.replies.items():
            row = wide[number]
            if row[OUTCOME]:
                continue
            try:
                counted = replies.read(int(row[PLACE]), received)
                kind, message = problem(counted.reply)
            except ValueError as error:
                kind, message = GARBLED, str(error)
            if kind:
                row[OUTCOME] = self._kinds.setdefault(kind, len(self._kinds) + 1)
                samples = self._messages.setdefault(int(row[OUTCOME]), [])
                if message not in samples and len(samples) < ERROR_SAMPLES_MAX:
                    samples.append(message)
                continue
            gaps = fill(row, counted)
            if self._keep:
                chunk.responses[number] = tuple(counted.reply.times_ns.tolist())
            self._gaps.append((int(row[DONE]), gaps))
        return wide

    def _remember(self, rows: Rows, chunk: Chunk) -> None:
        names = {number: kind for kind, number in self._kinds.items()}
        for index, row in enumerate(rows.tolist()):
            times = chunk.responses.get(index, ())
            record = RequestRecord(
                begin_ns=self.epoch_ns(row[SENT]),
                response_ns=tuple(self.epoch_ns(at) for at in times),
                stream=row[PLACE] >> 32,
                step=row[PLACE] & _STEP_MASK,
                sequence_id=row[SEQUENCE] >> 1,
                error=names.get(row[OUTCOME], ""),
            )
            self._requests.append((row[DONE], record))


_NO_TIMES = np.empty(0, np.int64)


class Recent:
    """The requests since the last progress event."""

    def __init__(self) -> None:
        self._times: list[Rows] = [_NO_TIMES]

    def add(self, rows: Rows) -> None:
        self._times.append(response_times(successes(rows)))

    def take(self) -> tuple[int, int, int]:
        """Return number, median and 99th percentile of the response times since the last call."""
        times = np.concatenate(self._times)
        self._times = [_NO_TIMES]
        if not times.size:
            return 0, 0, 0
        p50, p99 = np.percentile(times, (50, 99), method="nearest").tolist()
        return int(times.size), int(p50), int(p99)


def _spent(samples: list[tuple[int, int]], begin_ns: int, end_ns: int) -> int:
    if len(samples) < 2:
        return 0
    at, cpu = np.array(samples, np.float64).T
    return int(np.interp(end_ns, at, cpu) - np.interp(begin_ns, at, cpu))
