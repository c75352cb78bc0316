"""The batches of one instance: queued, running, and finished with open requests.

A batch is sent to the worker, runs after those before it, and may leave requests open that the model answers later.
When the worker ends, the running batch and the open requests fail with the reason; batches that have not begun run on
the next worker.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from charonia.core.errors import ServingError, internal, unavailable
from charonia.core.request import InferRequest
from charonia.server.backends.api import BatchSink, BusyPolling, Result
from charonia.server.backends.python.calls import Work
from charonia.server.backends.python.codec import decode_results, encode_requests
from charonia.server.backends.python.process import WorkerLink
from charonia.server.channel.channel import Incoming
from charonia.server.channel.regions import ChannelError

_log = logging.getLogger(__name__)

RESTART_WAIT_S_MAX = 20.0
"""Longest time that a batch waits for a worker that is being restarted."""


class BatchInFlight(Work):
    """A batch that is not finished, or has left requests open.

    Attributes:
        number: Its number in messages, 0 until it is sent to the current worker.
        over: Indices of requests that have their last response; None for none.
        gone: Indices of requests whose callers have gone; None for none.
    """

    __slots__ = ("gone", "number", "over")

    def __init__(self, sink: BatchSink, requests: Sequence[InferRequest]) -> None:
        super().__init__(sink, requests)
        self.number = 0
        self.over: set[int] | None = None
        self.gone: set[int] | None = None

    def note_over(self, index: int) -> None:
        """Note that a request has its last response."""
        if self.over is None:
            self.over = set()
        self.over.add(index)

    def open_requests(self) -> list[int]:
        """Return the indices of the requests without a last response."""
        return [index for index in range(len(self.requests)) if self.over is None or index not in self.over]

    def fail(self, error: ServingError) -> None:
        """End the batch with an error for all of its requests."""
        now = time.monotonic_ns()
        self.sink.finish(now, now, error)


class Batches:
    """The batches in flight.

    Args:
        name: Instance name.
        output_names: All outputs of the model.
        execute_s_max: Time that a batch has, 0 for no limit.
        is_decoupled: Whether a request may have any number of responses.
        busy_poll: Busy polling, None where it is off.

    Attributes:
        answered: Batches that the current worker has answered.
    """

    def __init__(
        self,
        name: str,
        *,
        output_names: tuple[str, ...],
        execute_s_max: float,
        is_decoupled: bool,
        busy_poll: BusyPolling | None,
    ) -> None:
        self.answered = 0
        self._name = name
        self._output_names = output_names
        self._execute_s_max = execute_s_max
        self._is_decoupled = is_decoupled
        self._busy_poll = busy_poll
        self._loop = asyncio.get_running_loop()
        self._link: WorkerLink | None = None  # to the current worker
        self._is_ready = False
        self._is_closed = False
        self._queue: deque[BatchInFlight] = deque()  # the first one runs, once it is sent
        self._warming: deque[BatchInFlight] = deque()  # warm-up, which a new worker runs first
        self._outbox: list[BatchInFlight] = []  # sent at the end of this iteration of the event loop
        self._left_open: dict[int, BatchInFlight] = {}  # finished, with open requests
        self._sent = 0
        self._timer: asyncio.TimerHandle | None = None  # of the first batch
        self._told_awake_ns = 0

    def __len__(self) -> int:
        return len(self._queue) + len(self._left_open)

    # Called for the engine

    def add(self, sink: BatchSink, requests: Sequence[InferRequest]) -> None:
        """Queue a batch; it is sent at once, or when a worker is ready."""
        batch = BatchInFlight(sink, requests)
        self._queue.append(batch)
        if self._is_ready:
            self._send(batch)
        elif self._is_closed:
            self._fail_first(unavailable(f"instance '{self._name}' is closed"))
        elif len(self._queue) == 1:
            self._limit(RESTART_WAIT_S_MAX, self._waited_too_long)

    def cancel(self, sink: BatchSink, index: int) -> bool:
        """Notify the model that the caller of a request has gone; return whether all callers of the batch have."""
        batch = next((b for b in (*self._queue, *self._left_open.values()) if b.sink is sink), None)
        if batch is None:
            return False
        if batch.gone is None:
            batch.gone = set()
        batch.gone.add(index)
        if batch.number and self._link is not None:
            self._link.process.send(("cancel", batch.number, index))
        is_abandoned = all(sink.is_cancelled(i) for i in range(len(batch.requests)))
        if is_abandoned:
            self._left_open.pop(batch.number, None)
        return is_abandoned

    def close(self) -> None:
        """Accept no more batches."""
        self._is_closed = True
        self.detach()
        self._limit(0, None)

    # Called by the supervisor

    def attach(self, link: WorkerLink) -> None:
        """A new worker has loaded its model."""
        self._link = link
        self._told_awake_ns = 0
        self.answered = 0

    def warm_up(self, sink: BatchSink, requests: Sequence[InferRequest]) -> None:
        """Run a warm-up batch on a new worker."""
        batch = BatchInFlight(sink, requests)
        self._warming.append(batch)
        self._send(batch)

    def begin(self) -> None:
        """The worker is ready for requests."""
        self._is_ready = True
        self._limit(0, None)
        for batch in self._queue:
            self._send(batch)

    def detach(self) -> None:
        """Send nothing more to the worker."""
        self._link = None
        self._is_ready = False
        self._outbox.clear()

    def worker_ended(self, error: ServingError, *, fails_unsent: bool) -> None:
        """Fail the running batch and open requests; the other batches wait for the next worker.

        Args:
            error: The error.
            fails_unsent: Whether the first batch fails, too, if the worker has not got it.
        """
        self._warming.clear()
        left_open, self._left_open = self._left_open, {}
        for batch in left_open.values():
            for index in batch.open_requests():
                batch.sink.respond(index, error, True)
        if self._queue and (self._queue[0].number or fails_unsent):
            self._fail_first(error)
        for batch in self._queue:
            batch.number = 0
        if self._queue:
            self._limit(RESTART_WAIT_S_MAX, self._waited_too_long)

    # Messages of the worker

    def running(self, number: int) -> Work | None:
        """Return the running batch, if it has this number."""
        line = self._warming or self._queue
        return line[0] if number and line and line[0].number == number else None

    def done(self, message: Incoming, link: WorkerLink) -> None:
        """Handle the results of the running batch. Raises as `decode_results`."""
        _, number, results, released, freed, input_end, output_start = message.header
        line = self._warming or self._queue
        if not line or number != line[0].number:
            return
        decoded = decode_results(results, message, link)
        if released or freed:
            link.note(released, freed)
        batch = line.popleft()
        if line is self._queue:
            self.answered += 1
            if self._execute_s_max:
                self._limit(self._execute_s_max if self._queue else 0, self._executed_too_long)
        try:
            is_open = self._hand_on(batch, decoded)
        except Exception:
            _log.exception("the results of a batch of '%s' cannot be handed on", self._name)
            batch.fail(internal(f"the server met a fault of its own with the results of instance '{self._name}'"))
        else:
            batch.sink.finish(input_end, output_start, leaves_open=is_open)

    def responses(self, message: Incoming, link: WorkerLink) -> None:
        """Handle responses to requests of the running batch, or to open ones. Raises as `decode_results`."""
        _, sent, released, freed = message.header
        decoded = decode_results([result for _, _, result, _ in sent], message, link)
        link.note(released, freed)
        for (number, index, _, final), result in zip(sent, decoded, strict=True):
            self._respond(number, index, result, bool(final))
        del decoded, result
        link.flush()

    # Inside

    def _respond(self, number: int, index: int, result: Result | None, final: bool) -> None:
        batch = self._left_open.get(number)
        if batch is None:
            line = self._warming or self._queue
            batch = next((b for b in line if number and b.number == number), None)
        if batch is not None:
            if not 0 <= index < len(batch.requests):
                raise ChannelError(f"batch {number} has no request {index}")
            if final or not self._is_decoupled:
                batch.note_over(index)
                if not batch.open_requests():
                    self._left_open.pop(number, None)
            batch.sink.respond(index, result, final)

    def _hand_on(self, batch: BatchInFlight, results: Sequence[Result | None]) -> bool:
        """Pass results to the requests of a batch; return whether some stay open."""
        sink = batch.sink
        is_open = False
        for index, result in enumerate(results):
            if result is None:
                is_open = True
            else:
                sink.respond(index, result, True)
        if is_open:
            for index, result in enumerate(results):
                if result is not None:
                    batch.note_over(index)
            is_open = any(not sink.is_cancelled(index) for index in batch.open_requests())
            if is_open:
                self._left_open[batch.number] = batch
        return is_open

    def _send(self, batch: BatchInFlight) -> None:
        """Send a batch, together with others of the same iteration of the event loop."""
        if not self._outbox:
            self._loop.call_soon(self._hand_over)
        self._outbox.append(batch)

    def _hand_over(self) -> None:
        batches, self._outbox = self._outbox, []
        while batches and self._link is not None:
            awake_ns = self._busy_poll.worker_ns if self._busy_poll is not None else 0
            if awake_ns != self._told_awake_ns:
                self._link.process.send(("awake", awake_ns))
                self._told_awake_ns = awake_ns
            batches = batches[self._send_together(self._link, batches) :]

    def _send_together(self, link: WorkerLink, batches: Sequence[BatchInFlight]) -> int:
        """Send the first batch, and the next ones that fit into the same message; return how many."""
        outgoing = link.outgoing()
        content: list[tuple[int, list[tuple[object, ...]]]] = []
        number = self._sent
        try:
            for batch in batches:
                number += 1
                content.append((number, encode_requests(batch.requests, self._output_names, outgoing)))
                if outgoing.fds:  # their number per message is limited
                    break
            link.send(("execute", content), outgoing, at_once=True)
        except Exception as error:
            outgoing.withdraw()
            if len(batches) > 1:  # only the one that is at fault fails
                return self._send_together(link, batches[:1])
            if not isinstance(error, (ChannelError, OSError, TypeError, ValueError)):
                _log.exception("a batch of '%s' cannot be encoded", self._name)
            (self._warming or self._queue).remove(batches[0])
            batches[0].fail(internal(f"the batch cannot be handed to instance '{self._name}': {error}"))
            return 1
        self._sent = number
        for batch, (number, _) in zip(batches, content, strict=False):
            batch.number = number
            for index in batch.gone or ():
                link.process.send(("cancel", number, index))
            if self._queue and batch is self._queue[0]:
                self._limit(self._execute_s_max, self._executed_too_long)
        return len(content)

    def _executed_too_long(self) -> None:
        if self._link is not None:
            self._link.process.kill(f"a batch did not finish within {self._execute_s_max:g} s and was ended")

    def _waited_too_long(self) -> None:
        while self._queue:
            self._fail_first(unavailable(f"instance '{self._name}' has not come back within {RESTART_WAIT_S_MAX:g} s"))

    def _fail_first(self, error: ServingError) -> None:
        self._limit(0, None)
        self._queue.popleft().fail(error)

    def _limit(self, seconds: float, callback: Callable[[], None] | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if callback is not None and seconds > 0:
            self._timer = self._loop.call_later(seconds, callback)
