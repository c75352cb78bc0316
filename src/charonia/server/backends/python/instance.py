"""One instance of a Python model: a worker process that is started again when it ends.

A batch is handed over, runs when those before it are done, and may leave requests open that the model answers later.
When the worker ends, the batch that runs and the requests left open fail with the reason; batches that it has not begun
run on its successor.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum

from charonia.core.caller import CallFrame
from charonia.core.errors import ServingError, internal, unavailable
from charonia.core.request import InferRequest
from charonia.server.backends.api import BatchSink
from charonia.server.backends.python.calls import Work
from charonia.server.backends.python.codec import decode_results, encode_requests
from charonia.server.backends.python.health import WorkerHealth
from charonia.server.backends.python.link import WorkerLink
from charonia.server.backends.python.process import WorkerProcess
from charonia.server.backends.python.readiness import Readiness
from charonia.server.backends.python.rewarm import WarmSink
from charonia.server.backends.python.services import Server, WorkerServices
from charonia.server.backends.python.worker.charonia_channel import Incoming
from charonia.server.backends.python.worker.charonia_regions import ChannelError

_log = logging.getLogger(__name__)

RESTART_WAIT_S_MAX = 20.0
"""Longest time that a batch waits for a worker that is being started again."""

FINALIZE_S_MAX = 10.0
"""Time that a worker has for `finalize`."""


class _Batch(Work):
    """A batch that was handed over, and that is not finished or has left requests open.

    Attributes:
        number: Its number in messages, 0 until it was sent to the worker that runs now.
        over: Indices of requests that have their last response; None while there is none.
        gone: Indices of requests whose callers have gone; None while there is none.
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


class _State(Enum):
    STARTING = "starting"
    WARMING = "warming"
    READY = "ready"
    PAUSED = "paused"
    CLOSED = "closed"


class PythonInstance:
    """An `AsyncInstance` in a worker process.

    Args:
        name: Instance name.
        make_process: Starts a worker process with these callbacks for messages and its end.
        start_message: The message that makes it load the model.
        output_names: All outputs of the model.
        start_s_max: Time that the model has to initialize.
        execute_s_max: Time that a batch has, 0 for no limit.

    Attributes:
        health: What happened to its worker processes.
        capabilities: What the worker says that its model can do.
    """

    def __init__(
        self,
        name: str,
        make_process: Callable[[Callable[[Incoming], None], Callable[[str], None]], WorkerProcess],
        start_message: tuple[object, ...],
        *,
        output_names: tuple[str, ...],
        start_s_max: float,
        execute_s_max: float,
        server: Server | None = None,
        is_decoupled: bool = False,
    ) -> None:
        self.name = name
        self._make_process = make_process
        self._start_message = start_message
        self._output_names = output_names
        self._start_s_max = start_s_max
        self._execute_s_max = execute_s_max
        self._loop = asyncio.get_running_loop()
        self._state = _State.STARTING
        self._link: WorkerLink | None = None  # to the worker that runs now
        self._first_start: asyncio.Future[None] = self._loop.create_future()
        self._batches: deque[_Batch] = deque()  # the first one runs, where it was sent
        self._warm_up: Sequence[Sequence[InferRequest]] = ()
        self._warming: deque[_Batch] = deque()  # what a new worker runs before anything else; the first one runs
        self._outbox: list[_Batch] = []  # those that are sent at the end of this round of the event loop
        self._sent = 0
        self._timer: asyncio.TimerHandle | None = None  # the first batch's
        self._process_timer: asyncio.TimerHandle | None = None  # while starting its limit, while paused its end
        self._left_open: dict[int, _Batch] = {}  # finished, with requests that wait for their last response
        self.health = WorkerHealth()
        self.capabilities: Mapping[str, object] = {}
        self._reason = ""
        self._is_decoupled = is_decoupled
        server = server or Server(CallFrame(name, ""))
        self._services = WorkerServices(server, self._running)
        self._readiness = Readiness(name, self._ask_whether_ready)
        self._busy_poll = server.busy_poll
        self._told_awake_ns = 0

    @property
    def pid(self) -> int:
        """Process id of the worker, 0 while there is none."""
        return self._link.process.pid if self._link is not None else 0

    @property
    def problem(self) -> str:
        """Why no worker runs now, "" while one does."""
        return self.health.problem

    async def open(self) -> None:
        """Start the worker and wait until the model is initialized.

        Raises:
            ServingError: It could not be; the message says why.
        """
        self._start_process()
        try:
            await self._first_start
        except BaseException:
            await self.aclose()
            raise

    def start(self, requests: Sequence[InferRequest], sink: BatchSink) -> None:
        """Begin to run the requests as one batch."""
        batch = _Batch(sink, requests)
        self._batches.append(batch)
        if self._state is _State.READY:
            self._send(batch)
        elif self._state is _State.CLOSED:
            self._fail_first(unavailable(f"instance '{self.name}' is closed"))
        elif len(self._batches) == 1:
            self._limit(RESTART_WAIT_S_MAX, self._waited_too_long)

    def cancel(self, sink: BatchSink, index: int) -> None:
        """Tell the model that the caller of a request has gone; what it calls for nobody is given up."""
        batch = next((b for b in (*self._batches, *self._left_open.values()) if b.sink is sink), None)
        if batch is None:
            return
        if batch.gone is None:
            batch.gone = set()
        batch.gone.add(index)
        if batch.number and self._link is not None:
            self._link.process.send(("cancel", batch.number, index))
        if all(sink.is_cancelled(i) for i in range(len(batch.requests))):
            self._services.calls.cancel_batch(sink)
            self._left_open.pop(batch.number, None)

    def keep_warm(self, batches: Sequence[Sequence[InferRequest]]) -> None:
        """Have every later worker run these batches, successfully, before it gets requests."""
        self._warm_up = batches

    async def is_ready(self) -> bool:
        """Return whether a worker runs and its model does not say that it is not ready."""
        if self._state is not _State.READY:
            return False
        return not self.capabilities.get("has_is_ready") or await self._readiness.ask()

    def resident_bytes(self) -> int:
        """Return the resident memory of the worker process."""
        return self._link.process.resident_bytes() if self._link is not None else 0

    async def aclose(self) -> None:
        """Let the model finalize, where it was initialized, and end the worker."""
        is_initialized = self._state is _State.READY
        self._state = _State.CLOSED
        self._limit(0, None)
        self._stop_process_timer()
        link = self._unlink()
        if link is not None:
            if not is_initialized:
                link.process.kill("it is not wanted any more")
            await link.process.stop(FINALIZE_S_MAX)

    def _start_process(self) -> None:
        self._state = _State.STARTING
        if self._first_start.done():
            self.health.restarted()
        if self._start_s_max:
            self._process_timer = self._loop.call_later(self._start_s_max, self._started_too_slowly)
        try:
            process = self._make_process(self._message, self._ended)
        except OSError as error:
            self._ended(f"the worker process cannot be started: {error}")
            return
        self._link = WorkerLink(process)
        self._told_awake_ns = 0
        process.send(self._start_message)

    def _unlink(self) -> WorkerLink | None:
        """Have nothing to do with the worker any more; return the link to it."""
        link, self._link = self._link, None
        self._outbox.clear()
        if link is not None:
            link.is_open = False
            self._services.ended()
            self._readiness.gone()
        return link

    def _message(self, message: Incoming) -> None:
        link = self._link
        if link is None:
            return
        kind = message.header[0]
        try:
            if kind == "done":
                self._done(message, link)
            elif kind == "response":
                self._response(message, link)
            elif kind == "ready":
                self._ready(message)
            elif kind == "failed":
                self._reason = str(message.header[1])
            elif kind == "answer_ready":
                self._readiness.answered(*message.header[1:])
            else:
                self._services.take(message, link, is_ready=self._state in (_State.READY, _State.WARMING))
        except (ChannelError, ServingError, LookupError, TypeError, ValueError) as error:
            link.process.kill(f"it sent a message that cannot be read: {error}")

    def _ready(self, message: Incoming) -> None:
        self.capabilities = message.header[1] if len(message.header) > 1 else {}
        if self._first_start.done() and self._warm_up:
            self._state = _State.WARMING
            frame = CallFrame(self.name, "")
            self._warming.extend(_Batch(WarmSink(frame, self._warmed), batch) for batch in self._warm_up)
            self._send(self._warming[0])
        else:
            self._begin()

    def _warmed(self, problem: str) -> None:
        """A new worker has run a warm-up batch."""
        if problem:
            self._kill(f"warming it up again failed: {problem}")
        elif self._warming:
            self._send(self._warming[0])
        else:
            self._begin()

    def _begin(self) -> None:
        """The worker is ready for requests."""
        self._state = _State.READY
        self._stop_process_timer()
        if self.health.ready():
            _log.info("the worker process of '%s' is back", self.name)
        if not self._first_start.done():
            self._first_start.set_result(None)
        self._limit(0, None)
        for batch in self._batches:
            self._send(batch)

    @property
    def _line(self) -> "deque[_Batch]":
        """What the worker works on."""
        return self._warming or self._batches

    def _running(self, number: int) -> Work | None:
        """Return the batch that runs, if it has this number."""
        line = self._line
        return line[0] if number and line and line[0].number == number else None

    def _ask_whether_ready(self, number: int) -> None:
        if self._link is not None:
            self._link.process.send(("is_ready", number))

    def _send(self, batch: _Batch) -> None:
        """Send a batch, together with those that come in the same round of the event loop."""
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

    def _send_together(self, link: WorkerLink, batches: Sequence[_Batch]) -> int:
        """Send the first of these batches, and those behind it that fit into the same message; return how many."""
        outgoing = link.outgoing()
        content: list[tuple[int, list[tuple[object, ...]]]] = []
        number = self._sent
        try:
            for batch in batches:
                number += 1
                content.append((number, encode_requests(batch.requests, self._output_names, outgoing)))
                if outgoing.fds:  # of which a message carries only so many
                    break
            link.send(("execute", content), outgoing, at_once=True)
        except (ChannelError, OSError, TypeError, ValueError) as error:
            outgoing.withdraw()
            if len(batches) > 1:  # only the one that cannot be sent fails
                return self._send_together(link, batches[:1])
            self._line.remove(batches[0])
            _fail(batches[0], internal(f"the batch cannot be handed to instance '{self.name}': {error}"))
            return 1
        self._sent = number
        for batch, (number, _) in zip(batches, content, strict=False):
            batch.number = number
            for index in batch.gone or ():
                link.process.send(("cancel", number, index))
            if self._batches and batch is self._batches[0]:
                self._limit(self._execute_s_max, self._executed_too_long)
        return len(content)

    def _done(self, message: Incoming, link: WorkerLink) -> None:
        _, number, results, regions, dropped, input_end, output_start = message.header
        line = self._line
        if not line or number != line[0].number:
            return
        decoded = decode_results(results, message, link)
        if regions or dropped:
            link.given_back(regions, dropped)
        batch = line.popleft()
        if line is self._batches:
            self.health.answered()
            if self._execute_s_max:
                self._limit(self._execute_s_max if self._batches else 0, self._executed_too_long)
        sink = batch.sink
        is_open = False
        for index, result in enumerate(decoded):
            if result is None:
                is_open = True
            else:
                sink.respond(index, result, True)
        if is_open:
            for index, result in enumerate(decoded):
                if result is not None:
                    batch.note_over(index)
            is_open = any(not sink.is_cancelled(index) for index in batch.open_requests())
            if is_open:
                self._left_open[number] = batch
        sink.finish(input_end, output_start, leaves_open=is_open)

    def _response(self, message: Incoming, link: WorkerLink) -> None:
        _, number, index, result, final, released, dropped = message.header
        (decoded,) = decode_results([result], message, link)
        link.given_back(released, dropped)
        batch = self._left_open.get(number) or next((b for b in self._line if number and b.number == number), None)
        if batch is not None:
            if not 0 <= index < len(batch.requests):
                raise ChannelError(f"batch {number} has no request {index}")
            if final or not self._is_decoupled:
                batch.note_over(index)
                if not batch.open_requests():
                    self._left_open.pop(number, None)
            batch.sink.respond(index, decoded, bool(final))
        del decoded
        link.flush()

    def _ended(self, reason: str) -> None:
        """The worker process is gone."""
        self._unlink()
        self._stop_process_timer()
        if self._state is _State.CLOSED:
            return
        why = self._reason or reason
        self._reason = ""
        if not self._first_start.done():
            self._state = _State.CLOSED
            self._limit(0, None)
            self._first_start.set_exception(internal(f"instance '{self.name}' failed to start: {why}"))
            return
        _log.error("the worker process of '%s' ended: %s", self.name, why)
        failed_to_start = self._state in (_State.STARTING, _State.WARMING)
        self._warming.clear()
        self._state = _State.PAUSED
        self._process_timer = self._loop.call_later(self.health.ended(why), self._start_process)
        error = internal(f"the model instance '{self.name}' is not healthy: {why}")
        left_open, self._left_open = self._left_open, {}
        for batch in left_open.values():
            for index in batch.open_requests():
                batch.sink.respond(index, error, True)
        if self._batches and (self._batches[0].number or failed_to_start):
            self._fail_first(error)
        # Those behind it had not begun: they run on the next worker.
        for batch in self._batches:
            batch.number = 0
        if self._batches:
            self._limit(RESTART_WAIT_S_MAX, self._waited_too_long)

    def _started_too_slowly(self) -> None:
        self._kill(f"it did not initialize within {self._start_s_max:g} s")

    def _executed_too_long(self) -> None:
        self._kill(f"a batch did not finish within {self._execute_s_max:g} s and was ended")

    def _kill(self, reason: str) -> None:
        if self._link is not None:
            self._link.process.kill(reason)

    def _waited_too_long(self) -> None:
        while self._batches:
            self._fail_first(unavailable(f"instance '{self.name}' has not come back within {RESTART_WAIT_S_MAX:g} s"))

    def _fail_first(self, error: ServingError) -> None:
        self._limit(0, None)
        _fail(self._batches.popleft(), error)

    def _stop_process_timer(self) -> None:
        if self._process_timer is not None:
            self._process_timer.cancel()
            self._process_timer = None

    def _limit(self, seconds: float, callback: Callable[[], None] | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if callback is not None and seconds > 0:
            self._timer = self._loop.call_later(seconds, callback)


def _fail(batch: _Batch, error: ServingError) -> None:
    now = time.monotonic_ns()
    batch.sink.finish(now, now, error)
