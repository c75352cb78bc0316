"""The load loops: closed loop, open loop, and the growing load of `--periodic-concurrency-range`.

A loop runs on the event loop's thread of a worker process and sends that process's share of a level. It is finished
when all requests have been sent and have ended; an unlimited load finishes only after `stop`.

The timer of an open loop is precise to microseconds on Linux. Elsewhere, requests are up to a millisecond late. Their
latency counts from the scheduled time all the same. A worker that would sleep only briefly polls instead: waking up
takes as long as sending several requests, and the load generator would be late or measure it as latency.
"""

import asyncio
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from charonia.clock import WakeTimer, now_ns
from charonia.tools.perf.sending import RequestSender, Then
from charonia.tools.perf.sequences import Part, SequenceSlot
from charonia.wire.answer import Failure

RETRY_DELAY_S: Final = 0.05
"""Pause of a slot whose request never reached a server, so that a closed loop does not spin."""

_BURST_MAX: Final = 64
"""Limit of late requests that are sent in a row before answers are processed."""

ANSWER_NS_MAX: Final = 1_000_000
"""Longest time between two requests of a closed loop with one in flight for which the worker polls."""

GAP_NS_MAX: Final = 100_000
"""Longest wait for the next request of an open loop in which the worker polls."""

_UNSENT: Final = frozenset((Failure.REFUSED.name, Failure.RESET.name, Failure.EXHAUSTED.name, Failure.CLOSED.name))

Slot = SequenceSlot | Iterator[Part]
"""A source of requests: the parts of sequences, or steps of the data."""


def _ignore(kind: str) -> None:
    """Ignore the end of a request."""


def _nothing() -> None:
    """Do nothing when a time has come."""


class Polling:
    """Keeps the event loop awake for a short while, and measures how long it had nothing to do.

    Args:
        due: Called when the time has come.
        yields: Whether to yield the core to other processes after each poll; they may keep it for milliseconds.

    Attributes:
        waited_ns: Time of polling in which nothing was sent or answered.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, due: Callable[[], None], *, yields: bool) -> None:
        self.waited_ns = 0
        self._yields = yields
        self._call_soon = loop.call_soon
        self._due = due
        self._until_ns = 0
        self._polled_ns = 0
        self._is_polling = False
        self._is_idle = False

    def until(self, at_ns: int) -> None:
        """Poll until a time; a later call replaces it."""
        self._until_ns = at_ns
        self._is_idle = False
        if not self._is_polling:
            self._is_polling = True
            self._call_soon(self._poll)

    def answered(self) -> None:
        self._is_idle = False

    def _poll(self) -> None:
        now = now_ns()
        if self._is_idle:
            self.waited_ns += now - self._polled_ns
        if now < self._until_ns:
            self._is_idle = True
            self._polled_ns = now
            if self._yields:
                os.sched_yield()
            self._call_soon(self._poll)
        else:
            self._is_polling = False
            self._due()


def _polling(due: Callable[[], None], *, yields: bool) -> Polling | None:
    """Return what polls, None with a single core: polling would take it from the server."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1
    return Polling(asyncio.get_running_loop(), due, yields=yields) if cores > 1 else None


class _SlotState:
    """A slot and its requests in flight."""

    __slots__ = ("in_flight", "next", "slot", "then", "waiting")

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.next: Callable[[], Part] = slot.next if isinstance(slot, SequenceSlot) else slot.__next__
        self.then: Then = _ignore
        self.in_flight = 0
        self.waiting: deque[int] = deque()

    def failed(self) -> None:
        if isinstance(self.slot, SequenceSlot):
            self.slot.abandon()


class _SequenceCloser:
    """Ends open sequences when a load stops. Its requests are not measured."""

    def __init__(self, sender: RequestSender, places: list[_SlotState]) -> None:
        self._sender = sender
        self._places = places

    def finish(self, place: _SlotState) -> None:
        if place.in_flight or not isinstance(place.slot, SequenceSlot):
            return
        part = place.slot.finish()
        if part is not None:
            self._sender.is_recording = False
            self._sender.send(part, 0, _ignore)
            self._sender.is_recording = True

    def finish_all(self) -> None:
        for place in self._places:
            self.finish(place)


class ClosedLoopLoad:
    """Every slot sends its next request when the previous one has ended.

    Args:
        request_count: Requests to send; 0 for no limit.
        polls: Whether the worker may poll for the response of a lone request.
    """

    def __init__(self, sender: RequestSender, slots: list[Slot], request_count: int = 0, polls: bool = False) -> None:
        self._sender = sender
        self._polling = _polling(_nothing, yields=True) if polls and len(slots) == 1 else None
        self._sent_ns = 0
        self._places = [_SlotState(slot) for slot in slots]
        self._finishing = _SequenceCloser(sender, self._places)
        self._left = request_count if request_count else -1
        self._is_stopped = False
        self._call_later = asyncio.get_running_loop().call_later

    def start(self) -> None:
        """Send the first request of every slot."""
        for place in self._places:
            place.then = partial(self._ended, place)
            self._next(place)

    def stop(self) -> None:
        self._is_stopped = True
        self._finishing.finish_all()

    @property
    def is_finished(self) -> bool:
        return (self._is_stopped or not self._left) and not self._sender.in_flight

    @property
    def waited_ns(self) -> int:
        return self._polling.waited_ns if self._polling is not None else 0

    def _next(self, place: _SlotState) -> None:
        if self._is_stopped or not self._left:
            self._finishing.finish(place)
            return
        self._left -= 1
        place.in_flight = 1
        self._sender.send(place.next(), 0, place.then)
        if self._polling is not None:
            now = now_ns()
            if now - self._sent_ns < ANSWER_NS_MAX:
                self._polling.until(now + ANSWER_NS_MAX)
            self._sent_ns = now

    def _ended(self, place: _SlotState, kind: str) -> None:
        place.in_flight = 0
        if self._polling is not None:
            self._polling.answered()
        if kind:
            place.failed()
            if kind in _UNSENT:
                self._call_later(RETRY_DELAY_S, self._next, place)
                return
        delay_s = place.slot.delay_s if isinstance(place.slot, SequenceSlot) else 0.0
        if delay_s:
            self._call_later(delay_s, self._next, place)
        else:
            self._next(place)


class OpenLoop:
    """Requests are sent at scheduled times, independent of the progress of earlier ones.

    Args:
        times_ns: Scheduled send times, monotonic, ascending.
        request_count: Requests to send; 0 for no limit.
        serial: Whether requests of a slot never overlap. Waiting counts as latency.
    """

    def __init__(
        self,
        sender: RequestSender,
        slots: list[Slot],
        times_ns: Iterator[int],
        request_count: int = 0,
        serial: bool = False,
    ) -> None:
        self._sender = sender
        self._places = [_SlotState(slot) for slot in slots]
        self._finishing = _SequenceCloser(sender, self._places)
        self._times_ns = times_ns
        self._left = request_count if request_count else -1
        self._serial = serial
        self._turn = 0
        self._is_stopped = False
        self._next_ns = next(times_ns)
        self._loop = asyncio.get_running_loop()
        self._timer = WakeTimer(self._loop, self._due)
        self._polling = _polling(self._due, yields=False)

    def start(self) -> None:
        """Set the timer for the first request."""
        for place in self._places:
            place.then = partial(self._ended, place)
        self._timer.set(self._next_ns)

    def stop(self) -> None:
        if not self._is_stopped:
            self._is_stopped = True
            self._timer.close()
        for place in self._places:
            place.waiting.clear()
        self._finishing.finish_all()

    @property
    def is_finished(self) -> bool:
        waiting = any(place.waiting for place in self._places)
        return (self._is_stopped or not self._left) and not self._sender.in_flight and not waiting

    @property
    def waited_ns(self) -> int:
        return self._polling.waited_ns if self._polling is not None else 0

    def _due(self) -> None:
        room = _BURST_MAX
        while self._left and not self._is_stopped:
            wait_ns = self._next_ns - now_ns()
            if wait_ns > 0:
                if self._polling is not None and wait_ns < GAP_NS_MAX:
                    self._polling.until(self._next_ns)
                else:
                    self._timer.set(self._next_ns)
                return
            if not room:
                self._loop.call_soon(self._due)
                return
            self._arrive(self._next_ns)
            room -= 1
            self._left -= 1
            self._next_ns = next(self._times_ns)

    def _arrive(self, intended_ns: int) -> None:
        place = self._places[self._turn]
        self._turn = (self._turn + 1) % len(self._places)
        if self._serial and place.in_flight:
            place.waiting.append(intended_ns)
        else:
            self._send(place, intended_ns)

    def _send(self, place: _SlotState, intended_ns: int) -> None:
        place.in_flight += 1
        self._sender.send(place.next(), intended_ns, place.then)

    def _ended(self, place: _SlotState, kind: str) -> None:
        place.in_flight -= 1
        if self._polling is not None:
            self._polling.answered()
        if kind:
            place.failed()
        if place.waiting:
            self._send(place, place.waiting.popleft())
        elif self._is_stopped or not self._left:
            self._finishing.finish(place)


class PeriodicLoop:
    """Adds requests whenever each of those added last has had a number of responses.

    Args:
        period: Responses of each of the last added requests before more are added.
    """

    waited_ns: Final = 0

    def __init__(
        self, sender: RequestSender, slot: Iterator[Part], start: int, end: int, step: int, period: int
    ) -> None:
        self._sender = sender
        self._slot = slot
        self._left = end
        self._first = start
        self._step = step
        self._period = period
        self._behind = 0

    def start(self) -> None:
        self._add(self._first)

    def stop(self) -> None:
        self._left = 0

    @property
    def is_finished(self) -> bool:
        return not self._left and not self._sender.in_flight

    def _add(self, count: int) -> None:
        count = min(count, self._left)
        self._left -= count
        self._behind = count
        for _ in range(count):
            self._send()

    def _send(self) -> None:
        arrived = False

        def responded(count: int) -> None:
            if count >= self._period:
                arrive()

        def arrive(kind: str = "") -> None:
            nonlocal arrived
            if arrived:
                return
            arrived = True
            self._behind -= 1
            if not self._behind and self._left:
                self._add(self._step)

        # A request that ends early counts too, so that it does not block the load.
        request = self._sender.send(next(self._slot), 0, arrive)
        request.responded = responded
