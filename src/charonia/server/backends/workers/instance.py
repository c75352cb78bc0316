"""One instance of a model in a worker process: the batches that it runs, and the supervision of the process.

`Batches` sends batches and handles their results. A batch runs after those before it, and may leave requests open that
the model answers later. The instance starts the worker, warms it up, restarts it with back-off, and dispatches its
messages. When the worker ends, the running batch and the open requests fail with the reason; batches that have not
begun run on the next worker.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum

from charonia.core.errors import ServingError, internal, unavailable
from charonia.core.request import CallFrame, InferRequest
from charonia.server.backends.api import BatchSink, BusyPolling, Result
from charonia.server.backends.batch import ModelShapes
from charonia.server.backends.warm_up import WarmUpBatch
from charonia.server.backends.workers.codec import decode_results, encode_requests
from charonia.server.backends.workers.process import WorkerLink, WorkerProcess
from charonia.server.backends.workers.services import Readiness, ServerServices, Work, WorkerServices
from charonia.server.channel.channel import Incoming
from charonia.server.channel.regions import ChannelError

_log = logging.getLogger(__name__)

RESTART_WAIT_S_MAX = 20.0
"""Longest time that a batch waits for a worker that is being restarted."""


class BatchInFlight(Work):
    """A batch of a worker.

    Attributes:
        number: Its number in messages, 0 until it is sent to the current worker.
        gone: Indices of requests whose callers have gone; None for none.
    """

    __slots__ = ("gone", "number")

    def __init__(self, sink: BatchSink, requests: Sequence[InferRequest], shapes: ModelShapes | None) -> None:
        super().__init__(sink, requests, shapes)
        self.number = 0
        self.gone: set[int] | None = None

    def fail(self, error: ServingError) -> None:
        """End the batch with an error for all of its requests."""
        now = time.monotonic_ns()
        self.sink.finish(now, now, error)


class Batches:
    """The batches in flight.

    Args:
        execute_s_max: Time that a batch has, 0 for no limit.
        is_decoupled: Whether a request may have any number of responses.
        busy_poll: Busy polling, None where it is off.
        shapes: `reshape` of the configuration, None without.

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
        shapes: ModelShapes | None = None,
    ) -> None:
        self.answered = 0
        self._name = name
        self._output_names = output_names
        self._execute_s_max = execute_s_max
        self._is_decoupled = is_decoupled
        self._busy_poll = busy_poll
        self._shapes = shapes
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
        """Queue a batch; it is sent immediately, or when a worker is ready."""
        batch = BatchInFlight(sink, requests, self._shapes)
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

    # Called by the instance

    def attach(self, link: WorkerLink) -> None:
        """A new worker has loaded its model."""
        self._link = link
        self._told_awake_ns = 0
        self.answered = 0

    def warm_up(self, sink: BatchSink, requests: Sequence[InferRequest]) -> None:
        """Run a warm-up batch on a new worker."""
        batch = BatchInFlight(sink, requests, self._shapes)
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
            link.handle_lists(released, freed)
        batch = line.popleft()
        if line is self._queue:
            self.answered += 1
            if self._execute_s_max:
                self._limit(self._execute_s_max if self._queue else 0, self._executed_too_long)
        is_open, error = batch.deliver(decoded, self._name)
        if is_open:
            self._left_open[number] = batch
        batch.sink.finish(input_end, output_start, error, leaves_open=is_open)

    def responses(self, message: Incoming, link: WorkerLink) -> None:
        """Handle responses to requests of the running batch, or to open ones. Raises as `decode_results`."""
        _, sent, released, freed = message.header
        decoded = decode_results([result for _, _, result, _ in sent], message, link)
        link.handle_lists(released, freed)
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
                batch.record_last_response(index)
                if not batch.open_requests():
                    self._left_open.pop(number, None)
            batch.sink.respond(index, batch.answered(result), final)

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


FINALIZE_S_MAX = 10.0
"""Time limit of a worker for `finalize`."""

RESTART_DELAY_S = 0.05
"""Back-off before the first restart; it doubles with each consecutive restart without an answered batch."""

RESTART_DELAY_S_MAX = 30.0

FAILED_STARTS_MAX = 3
"""After so many consecutive failed starts, the worker counts as one that cannot be started; attempts continue."""

PROBLEM_CHARS_MAX = 4096
"""A longer reason is shortened to its beginning and end."""


MakeProcess = Callable[[Callable[[Incoming], None], Callable[[str], None]], WorkerProcess]
"""Starts a worker process with these callbacks for messages and its end."""


class WorkerHealth:
    """Restart history of one instance's worker.

    Attributes:
        problem: Why the worker is down, "" while it runs.
    """

    def __init__(self) -> None:
        self.restarts = 0
        self.problem = ""
        self._failures = self._failed_starts = 0

    @property
    def is_failing(self) -> bool:
        """Whether the worker cannot be started."""
        return self._failed_starts >= FAILED_STARTS_MAX

    def ended(self, reason: str, *, failed_to_start: bool = False) -> float:
        """Note that the worker ended; return the back-off in s before the next start."""
        self._failed_starts += failed_to_start
        delay = min(RESTART_DELAY_S * 2.0**self._failures, RESTART_DELAY_S_MAX)
        self._failures = min(self._failures + 1, 32)
        often = f" {self._failures} times in a row without an answer" if self._failures > 1 else ""
        if len(reason) > PROBLEM_CHARS_MAX:
            reason = f"{reason[: PROBLEM_CHARS_MAX // 2]} [...] {reason[-PROBLEM_CHARS_MAX // 2 :]}"
        self.problem = f"its worker has ended{often} and is started again after {delay:g} s: {reason}"
        return delay

    def restarted(self) -> None:
        """Note that a new worker has started; it is not ready yet."""
        self.restarts += 1

    def ready(self) -> bool:
        """Note that the worker is ready; return whether it was down before."""
        had_problem = bool(self.problem)
        self.problem = ""
        self._failed_starts = 0
        return had_problem

    def answered(self) -> None:
        self._failures = 0


class WorkerPhase(Enum):
    """Phase of an instance's worker."""

    STARTING = "starting"
    WARMING = "warming up"
    READY = "ready"
    PAUSED = "waiting to restart"
    CLOSED = "closed"


class PythonInstance:
    """An `AsyncInstance` in a worker process, which is restarted with back-off when it ends.

    Args:
        start_s_max: Time that the model has to initialize, 0 for no limit.
        execute_s_max: Time that a batch has, 0 for no limit.
        is_decoupled: Whether a request may have any number of responses.
        shapes: `reshape` of the configuration, None without.

    Attributes:
        health: Restarts of the worker, and why it is down.
    """

    def __init__(
        self,
        name: str,
        make_process: MakeProcess,
        start_message: tuple[object, ...],
        *,
        output_names: tuple[str, ...],
        start_s_max: float,
        execute_s_max: float,
        server: ServerServices | None = None,
        is_decoupled: bool = False,
        shapes: ModelShapes | None = None,
    ) -> None:
        self.name = name
        self.health = WorkerHealth()
        server = server or ServerServices(CallFrame(name, ""))
        self._batches = Batches(
            name,
            output_names=output_names,
            execute_s_max=execute_s_max,
            is_decoupled=is_decoupled,
            busy_poll=server.busy_poll,
            shapes=shapes,
        )
        self._services = WorkerServices(server, self._batches.running)
        self._readiness = Readiness(name, self._ask_whether_ready)
        self._phase = WorkerPhase.STARTING
        self._link: WorkerLink | None = None  # to the current worker
        self._has_is_ready = False
        self._warm_up: Sequence[Sequence[InferRequest]] = ()  # for each worker but the first
        self._warming: deque[Sequence[InferRequest]] = deque()
        self._on_lost: Callable[[], None] | None = None
        self._make_process = make_process
        self._start_message = start_message
        self._start_s_max = start_s_max
        self._loop = asyncio.get_running_loop()
        self._first_start: asyncio.Future[None] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None  # start limit while starting, end of the back-off while paused
        self._reason = ""

    def __repr__(self) -> str:
        """Return e.g. `<PythonInstance 'm_0_0' pid=4711 ready restarts=0 batches=2>`."""
        worker = f"pid={self.pid} {self._phase.value} restarts={self.health.restarts}"
        return f"<PythonInstance '{self.name}' {worker} batches={len(self._batches)}>"

    @property
    def pid(self) -> int:
        """Process id of the worker, 0 while there is none."""
        return self._link.process.pid if self._link is not None else 0

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, or never started."""
        return self._phase is WorkerPhase.CLOSED

    async def open(self) -> None:
        """Start the worker and wait until the model is initialized."""
        try:
            self._start_process()
            await self._first_start
        except BaseException:
            await self.aclose()
            raise

    def start(self, requests: Sequence[InferRequest], sink: BatchSink) -> None:
        self._batches.add(sink, requests)

    def cancel(self, sink: BatchSink, index: int) -> None:
        """Notify the model that a request's caller has gone; its calls end when all callers of the batch have gone."""
        if self._batches.cancel(sink, index):
            self._services.calls.cancel_batch(sink)

    def keep_warm(self, batches: Sequence[Sequence[InferRequest]]) -> None:
        self._warm_up = batches

    def when_lost(self, lost: Callable[[], None]) -> None:
        self._on_lost = lost

    async def is_ready(self) -> bool:
        """Return whether the worker runs, and its model, if it has `is_ready`, reports that it is ready."""
        return self._phase is WorkerPhase.READY and (not self._has_is_ready or await self._readiness.ask())

    def resident_bytes(self) -> int:
        """Return the resident memory of the worker process."""
        return self._link.process.resident_bytes() if self._link is not None else 0

    def cpu_seconds(self) -> float:
        """Return the CPU time of the worker process so far."""
        return self._link.process.cpu_seconds() if self._link is not None else 0.0

    async def aclose(self) -> None:
        """Let the model finalize, if it is initialized, and end the worker."""
        is_initialized = self._phase is WorkerPhase.READY
        self._phase = WorkerPhase.CLOSED
        self._batches.close()
        self._stop_timer()
        if self._link is None:
            return
        if not is_initialized:
            self._link.process.kill("it is no longer needed")
        try:
            await self._link.process.stop(FINALIZE_S_MAX)  # meanwhile the model may ask for its metrics
        finally:
            self._unlink()

    def _message(self, message: Incoming) -> None:
        link = self._link
        if link is None:
            return
        kind = message.header[0]
        try:
            if kind == "done":
                self._batches.done(message, link)
            elif kind == "responses":
                self._batches.responses(message, link)
            elif kind == "ready":
                self._initialized(link, message.header[1] if len(message.header) > 1 else {})
            elif kind == "failed":
                self._reason = str(message.header[1])
            elif kind == "raised":
                self._services.raised(self.name, *message.header[1:])
            elif kind == "answer_ready":
                self._readiness.answered(*message.header[1:])
            else:
                self._services.take(message, link, is_ready=self._phase in (WorkerPhase.READY, WorkerPhase.WARMING))
        except (ChannelError, ServingError, LookupError, TypeError, ValueError) as error:
            link.process.kill(f"it sent a message that cannot be read: {error}")

    def _ask_whether_ready(self, number: int) -> None:
        if self._link is not None:
            self._link.process.send(("is_ready", number))

    def _kill(self, reason: str) -> None:
        """Kill the worker; it is restarted."""
        if self._link is not None:
            self._link.process.kill(reason)

    def _start_process(self) -> None:
        self._phase = WorkerPhase.STARTING
        if self._first_start.done():
            self.health.restarted()
        if self._start_s_max:
            late = f"it did not initialize within {self._start_s_max:g} s"
            self._timer = self._loop.call_later(self._start_s_max, self._kill, late)
        try:
            process = self._make_process(self._message, self._ended)
        except OSError as error:
            self._ended(f"the worker process cannot be started: {error}")
            return
        self._link = WorkerLink(process)
        process.send(self._start_message)

    def _initialized(self, link: WorkerLink, capabilities: Mapping[str, object]) -> None:
        if self._phase is WorkerPhase.CLOSED:
            return
        self._has_is_ready = bool(capabilities.get("has_is_ready"))
        self._batches.attach(link)
        if self._first_start.done():
            self._phase = WorkerPhase.WARMING
            self._warming = deque(self._warm_up)
        self._warm_up_next()

    def _warm_up_next(self, error: ServingError | None = None) -> None:
        if error is not None:
            self._kill(f"warming it up again failed: {error.message}")
        elif self._warming:
            requests = self._warming.popleft()
            self._batches.warm_up(WarmUpBatch(requests, CallFrame(self.name, ""), self._warm_up_next), requests)
        else:
            self._begin()

    def _begin(self) -> None:
        self._phase = WorkerPhase.READY
        self._stop_timer()
        if self.health.ready():
            _log.info("the worker process of '%s' is back", self.name)
        if not self._first_start.done():
            self._first_start.set_result(None)
        self._batches.begin()

    def _unlink(self) -> None:
        link, self._link = self._link, None
        self._batches.detach()
        if link is not None:
            link.is_open = False
            self._services.ended()
            self._readiness.gone()

    def _ended(self, reason: str) -> None:
        self._unlink()
        self._stop_timer()
        if self._phase is WorkerPhase.CLOSED:
            return
        why = self._reason or reason
        self._reason = ""
        if not self._first_start.done():
            self._phase = WorkerPhase.CLOSED
            self._batches.close()
            self._first_start.set_exception(internal(f"instance '{self.name}' failed to start: {why}"))
            return
        _log.error("the worker process of '%s' ended: %s", self.name, why)
        failed_to_start = self._phase in (WorkerPhase.STARTING, WorkerPhase.WARMING)
        self._phase = WorkerPhase.PAUSED
        if self._batches.answered:
            self.health.answered()
            self._batches.answered = 0
        delay_s = self.health.ended(why, failed_to_start=failed_to_start)
        self._timer = self._loop.call_later(delay_s, self._start_process)
        error = internal(f"the model instance '{self.name}' is not healthy: {why}")
        if self._on_lost is not None:
            self._on_lost()
        self._batches.worker_ended(error, fails_unsent=failed_to_start or self._on_lost is not None)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
