"""One instance of a Python model: a worker process that is started again when it ends."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum

from charonia.backends.api import BatchSink
from charonia.backends.python.codec import decode_results, encode_requests
from charonia.backends.python.health import WorkerHealth
from charonia.backends.python.process import WorkerProcess
from charonia.backends.python.worker.charonia_channel import ChannelError, Incoming, Outgoing
from charonia.core.errors import ServingError, internal, unavailable
from charonia.core.request import InferRequest

_log = logging.getLogger(__name__)

RESTART_WAIT_S_MAX = 20.0
"""Longest time that a batch waits for a worker that is being started again."""

FINALIZE_S_MAX = 10.0
"""Time that a worker has for `finalize`."""


class _Batch:
    """A batch that was handed over and is not finished."""

    __slots__ = ("number", "requests", "sink")

    def __init__(self, requests: Sequence[InferRequest], sink: BatchSink) -> None:
        self.requests = requests
        self.sink = sink
        self.number = 0  # 0 until it was sent to the worker that runs now


class _State(Enum):
    STARTING = "starting"
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
    ) -> None:
        self.name = name
        self._make_process = make_process
        self._start_message = start_message
        self._output_names = output_names
        self._start_s_max = start_s_max
        self._execute_s_max = execute_s_max
        self._loop = asyncio.get_running_loop()
        self._state = _State.STARTING
        self._process: WorkerProcess | None = None
        self._first_start: asyncio.Future[None] = self._loop.create_future()
        self._batches: deque[_Batch] = deque()  # the first one runs, where it was sent
        self._sent = 0
        self._timer: asyncio.TimerHandle | None = None  # the first batch's
        self._process_timer: asyncio.TimerHandle | None = None  # while starting its limit, while paused its end
        self.health = WorkerHealth()
        self._reason = ""
        self._released: list[int] = []  # regions of the worker that nobody here looks at any more
        self._dropped: list[int] = []  # regions of ours that were given up

    @property
    def pid(self) -> int:
        """Process id of the worker, 0 while there is none."""
        return self._process.pid if self._process is not None else 0

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
        self._batches.append(_Batch(requests, sink))
        if self._state is _State.READY:
            self._send_waiting()
        elif self._state is _State.CLOSED:
            self._fail_first(unavailable(f"instance '{self.name}' is closed"))
        elif len(self._batches) == 1:
            self._limit(RESTART_WAIT_S_MAX, self._waited_too_long)

    def cancel(self, sink: BatchSink, index: int) -> None:
        """Do nothing: the model runs on, and its answer to this request is dropped."""

    def resident_bytes(self) -> int:
        """Return the resident memory of the worker process."""
        return self._process.resident_bytes() if self._process is not None else 0

    async def aclose(self) -> None:
        """Let the model finalize, where it was initialized, and end the worker."""
        is_initialized = self._state is _State.READY
        self._state = _State.CLOSED
        self._limit(0, None)
        self._stop_process_timer()
        process, self._process = self._process, None
        if process is not None:
            if not is_initialized:
                process.kill("it is not wanted any more")
            await process.stop(FINALIZE_S_MAX)

    def _start_process(self) -> None:
        self._state = _State.STARTING
        if self._first_start.done():
            self.health.restarted()
        if self._start_s_max:
            self._process_timer = self._loop.call_later(self._start_s_max, self._started_too_slowly)
        self._released, self._dropped = [], []
        try:
            process = self._process = self._make_process(self._message, self._ended)
        except OSError as error:
            self._ended(f"the worker process cannot be started: {error}")
            return
        process.send(self._start_message)

    def _message(self, message: Incoming) -> None:
        kind = message.header[0]
        if kind == "done":
            self._done(message)
        elif kind == "ready":
            self._state = _State.READY
            self._stop_process_timer()
            if self.health.ready():
                _log.info("the worker process of '%s' is back", self.name)
            if not self._first_start.done():
                self._first_start.set_result(None)
            self._limit(0, None)
            self._send_waiting()
        elif kind == "failed":
            self._reason = str(message.header[1])

    def _send_waiting(self) -> None:
        for batch in list(self._batches):
            if not batch.number:  # a batch that fails may have brought in, and sent, others
                self._send(batch)

    def _send(self, batch: _Batch) -> None:
        process = self._process
        if process is None:
            return
        outgoing = Outgoing(process.pool)
        self._sent = batch.number = self._sent + 1
        released, dropped = self._released.copy(), self._dropped
        try:
            encoded = encode_requests(batch.requests, self._output_names, outgoing)
            process.send(("execute", batch.number, encoded, released, dropped), outgoing)
        except (ChannelError, OSError, TypeError, ValueError) as error:
            outgoing.withdraw()
            self._batches.remove(batch)
            _fail(batch, internal(f"the batch cannot be handed to instance '{self.name}': {error}"))
            return
        # In place: responses that somebody still looks at append to this list, perhaps in other threads.
        del self._released[: len(released)]
        self._dropped = []
        if batch is self._batches[0]:
            self._limit(self._execute_s_max, self._executed_too_long)

    def _done(self, message: Incoming) -> None:
        _, number, results, regions, dropped, input_end, output_start = message.header
        process = self._process
        if process is None or not self._batches or number != self._batches[0].number:
            return
        self.health.answered()
        self._dropped += process.pool.release(regions)
        try:
            decoded = decode_results(results, message, self._released.append)
        except (ChannelError, ServingError, LookupError, TypeError, ValueError) as error:
            process.kill(f"it sent a response that cannot be read: {error}")
            return
        process.drop(dropped)
        sink = self._batches.popleft().sink
        self._limit(self._execute_s_max if self._batches else 0, self._executed_too_long)
        for index, result in enumerate(decoded):
            sink.respond(index, result, True)
        sink.finish(input_end, output_start)

    def _ended(self, reason: str) -> None:
        """The worker process is gone."""
        self._process = None
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
        failed_to_start = self._state is _State.STARTING
        self._state = _State.PAUSED
        self._process_timer = self._loop.call_later(self.health.ended(why), self._start_process)
        if self._batches and (self._batches[0].number or failed_to_start):
            self._fail_first(internal(f"the model instance '{self.name}' is not healthy: {why}"))
        # Those behind it had not begun: they run on the next worker.
        for batch in self._batches:
            batch.number = 0
        if self._batches:
            self._limit(RESTART_WAIT_S_MAX, self._waited_too_long)

    def _started_too_slowly(self) -> None:
        if self._process is not None:
            self._process.kill(f"it did not initialize within {self._start_s_max:g} s")

    def _executed_too_long(self) -> None:
        if self._process is not None:
            self._process.kill(f"a batch did not finish within {self._execute_s_max:g} s and was ended")

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
