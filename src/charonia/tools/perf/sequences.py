"""Selects the next request: of a sequence, or a step of the data. Pure. Random choices are seeded."""

from collections.abc import Iterator
from random import Random

from charonia.core.native import mypyc_attr
from charonia.tools.perf.api import InputSource, SequencePlan


class Part:
    """A request: a step of the data, optionally as part of a sequence.

    Attributes:
        sequence_id: Correlation id, 0 for a request outside any sequence.
        start: Whether it is the first of its sequence.
    """

    __slots__ = ("end", "sequence_id", "start", "step", "stream")

    def __init__(self, stream: int, step: int, sequence_id: int = 0, start: bool = False, end: bool = False) -> None:
        self.stream = stream
        self.step = step
        self.sequence_id = sequence_id
        self.start = start
        self.end = end


def steps_once(source: InputSource) -> Iterator[Part]:
    for stream in range(source.stream_count):
        for step in range(source.step_count(stream)):
            yield Part(stream, step)


def steps(source: InputSource, first: int, stride: int) -> Iterator[Part]:
    """Cycle through the steps of all streams; each of `stride` processes takes its own share."""
    parts = list(steps_once(source))
    at = first % len(parts)
    while True:
        yield parts[at]
        at = (at + stride) % len(parts)


class SequenceIds:
    """Reusable correlation ids; each of several processes has its own share."""

    def __init__(self, plan: SequencePlan, process: int, process_count: int) -> None:
        self._first = plan.first_id
        self._count = plan.id_count
        self._stride = process_count
        self._process = process
        self._next = process
        self._busy: set[int] = set()

    def take(self) -> int:
        """Return an id that no open sequence of this process uses."""
        for _ in range(len(self._busy) + 1):
            number = self._next
            self._next += self._stride
            if self._next >= self._count:
                self._next = self._process
            found = self._first + number % self._count
            if found not in self._busy:
                break
        self._busy.add(found)
        return found

    def release(self, sequence_id: int) -> None:
        """Release the id of a sequence that has ended."""
        self._busy.discard(sequence_id)


@mypyc_attr(allow_interpreted_subclasses=True)
class SequenceSlot:
    """Runs one sequence at a time."""

    def __init__(self, plan: SequencePlan, source: InputSource, ids: SequenceIds, seed: int) -> None:
        self._plan = plan
        self._source = source
        self._ids = ids
        self._random = Random(seed)
        self._position = 0
        self._length = 0
        self._stream = 0
        self._id = 0

    @property
    def delay_s(self) -> float:
        return 0.0

    @property
    def is_open(self) -> bool:
        """Whether a sequence has started and not ended."""
        return self._position < self._length

    def next(self) -> Part:
        """Return the next request: of the open sequence, or the first of a new one."""
        if not self.is_open:
            self._begin()
        position = self._position
        self._position += 1
        return self._part(position, end=self._position == self._length)

    def finish(self) -> Part | None:
        """Return a request that ends the open sequence now, None if no sequence is open."""
        if not self.is_open:
            return None
        position, self._position = self._position, self._length
        return self._part(position, end=True)

    def abandon(self) -> None:
        """Drop the open sequence after a failed request, because the server may have lost it."""
        if self.is_open:
            self._position = self._length
            self._ids.release(self._id)

    def _begin(self) -> None:
        self._choose(self._random.randrange(self._source.stream_count))

    def _choose(self, stream: int) -> None:
        self._stream = stream
        if self._plan.length_from_data:
            self._length = self._source.step_count(self._stream)
        else:
            spread = int(self._plan.length * self._plan.variation)
            self._length = max(1, self._plan.length + self._random.randint(-spread, spread))
        self._position = 0
        self._id = self._ids.take()

    def _part(self, position: int, end: bool) -> Part:
        if end:
            self._ids.release(self._id)
        step = position % self._source.step_count(self._stream)
        return Part(self._stream, step, self._id, start=position == 0, end=end)
