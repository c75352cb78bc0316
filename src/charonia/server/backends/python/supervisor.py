"""Supervises one instance's worker: starts it, warms it up, and restarts it with back-off when it ends."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum

from charonia.core.errors import ServingError, internal
from charonia.core.request import CallFrame, InferRequest
from charonia.server.backends.api import Result
from charonia.server.backends.python.batches import Batches
from charonia.server.backends.python.process import WorkerLink, WorkerProcess
from charonia.server.channel.channel import Incoming

_log = logging.getLogger(__name__)

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
        restarts: Number of restarts.
        problem: Why the worker is down, "" while it runs.
    """

    __slots__ = ("_failed_starts", "_failures", "problem", "restarts")

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


class WorkerSupervisor:
    """Keeps a worker process running.

    Args:
        name: Instance name.
        make_process: Starts a worker process.
        start_message: The message that loads the model.
        start_s_max: Time that the model has to initialize, 0 for no limit.
        batches: Batches of the instance.
        on_message: Called with each message of the worker.
        on_unlink: Called when a worker has ended or is no longer needed.

    Attributes:
        state: Phase of the worker.
        link: The link to the current worker, None while there is none.
        health: Restarts of the worker, and why it is down.
        capabilities: Optional methods that the model has, as reported by the worker.
        warm_up: The batches that each worker but the first must complete before it gets requests.
        on_lost: Called when a worker has ended, before its batches fail; None where its model remembers nothing.
    """

    def __init__(
        self,
        name: str,
        make_process: MakeProcess,
        start_message: tuple[object, ...],
        *,
        start_s_max: float,
        batches: Batches,
        on_message: Callable[[Incoming], None],
        on_unlink: Callable[[], None],
    ) -> None:
        self.state = WorkerPhase.STARTING
        self.link: WorkerLink | None = None
        self.health = WorkerHealth()
        self.capabilities: Mapping[str, object] = {}
        self.warm_up: Sequence[Sequence[InferRequest]] = ()
        self.on_lost: Callable[[], None] | None = None
        self._name = name
        self._make_process = make_process
        self._start_message = start_message
        self._start_s_max = start_s_max
        self._batches = batches
        self._on_message = on_message
        self._on_unlink = on_unlink
        self._loop = asyncio.get_running_loop()
        self._first_start: asyncio.Future[None] = self._loop.create_future()
        self._warming: deque[Sequence[InferRequest]] = deque()
        self._timer: asyncio.TimerHandle | None = None  # start limit while starting, end of the back-off while paused
        self._reason = ""

    def __repr__(self) -> str:
        """Return e.g. `pid=4711 ready restarts=0`."""
        pid = self.link.process.pid if self.link is not None else 0
        return f"pid={pid} {self.state.value} restarts={self.health.restarts}"

    async def start(self) -> None:
        """Start the first worker and wait until its model is initialized.

        Raises:
            ServingError: It failed, with the reason.
        """
        self._start_process()
        await self._first_start

    async def close(self) -> None:
        """Let the model finalize, if it is initialized, and end the worker."""
        is_initialized = self.state is WorkerPhase.READY
        self.state = WorkerPhase.CLOSED
        self._batches.close()
        self._stop_timer()
        link = self.link
        if link is None:
            return
        if not is_initialized:
            link.process.kill("it is no longer needed")
        try:
            await link.process.stop(FINALIZE_S_MAX)  # meanwhile the model may ask for its metrics
        finally:
            self._unlink()

    def kill(self, reason: str) -> None:
        """Kill the worker; it is restarted."""
        if self.link is not None:
            self.link.process.kill(reason)

    def initialized(self, capabilities: Mapping[str, object]) -> None:
        """The worker reports that its model is initialized."""
        link = self.link
        if link is None or self.state is WorkerPhase.CLOSED:
            return
        self.capabilities = capabilities
        self._batches.attach(link)
        if self._first_start.done():
            self.state = WorkerPhase.WARMING
            self._warming = deque(self.warm_up)
        self._warm_up_next()

    def failed(self, reason: str) -> None:
        self._reason = reason

    def _start_process(self) -> None:
        self.state = WorkerPhase.STARTING
        if self._first_start.done():
            self.health.restarted()
        if self._start_s_max:
            self._timer = self._loop.call_later(self._start_s_max, self._started_too_slowly)
        try:
            process = self._make_process(self._on_message, self._ended)
        except OSError as error:
            self._ended(f"the worker process cannot be started: {error}")
            return
        self.link = WorkerLink(process)
        process.send(self._start_message)

    def _started_too_slowly(self) -> None:
        self.kill(f"it did not initialize within {self._start_s_max:g} s")

    def _warm_up_next(self) -> None:
        if not self._warming:
            self._begin()
            return
        self._batches.warm_up(WarmUpSink(CallFrame(self._name, ""), self._warmed_up), self._warming.popleft())

    def _warmed_up(self, problem: str) -> None:
        if problem:
            self.kill(f"warming it up again failed: {problem}")
        else:
            self._warm_up_next()

    def _begin(self) -> None:
        self.state = WorkerPhase.READY
        self._stop_timer()
        if self.health.ready():
            _log.info("the worker process of '%s' is back", self._name)
        if not self._first_start.done():
            self._first_start.set_result(None)
        self._batches.begin()

    def _unlink(self) -> WorkerLink | None:
        """Detach from the worker; return the link to it."""
        link, self.link = self.link, None
        self._batches.detach()
        if link is not None:
            link.is_open = False
            self._on_unlink()
        return link

    def _ended(self, reason: str) -> None:
        self._unlink()
        self._stop_timer()
        if self.state is WorkerPhase.CLOSED:
            return
        why = self._reason or reason
        self._reason = ""
        if not self._first_start.done():
            self.state = WorkerPhase.CLOSED
            self._batches.close()
            self._first_start.set_exception(internal(f"instance '{self._name}' failed to start: {why}"))
            return
        _log.error("the worker process of '%s' ended: %s", self._name, why)
        failed_to_start = self.state in (WorkerPhase.STARTING, WorkerPhase.WARMING)
        self.state = WorkerPhase.PAUSED
        if self._batches.answered:
            self.health.answered()
            self._batches.answered = 0
        delay_s = self.health.ended(why, failed_to_start=failed_to_start)
        self._timer = self._loop.call_later(delay_s, self._start_process)
        error = internal(f"the model instance '{self._name}' is not healthy: {why}")
        if self.on_lost is not None:
            self.on_lost()
        self._batches.worker_ended(error, fails_unsent=failed_to_start or self.on_lost is not None)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class WarmUpSink:
    """The `BatchSink` of a warm-up batch.

    Args:
        frame: The caller of requests that the model makes meanwhile.
        done: Called after the batch, with the problem or "".
    """

    def __init__(self, frame: CallFrame, done: Callable[[str], None]) -> None:
        self._frame = frame
        self._done = done
        self._problem = ""

    def respond(self, index: int, result: Result | None, final: bool) -> None:
        if isinstance(result, ServingError):
            self._problem = self._problem or result.message

    def finish(
        self, input_end_ns: int, output_start_ns: int, error: ServingError | None = None, *, leaves_open: bool = False
    ) -> None:
        self._done(self._problem or (error.message if error is not None else ""))

    def is_cancelled(self, index: int) -> bool:
        """Return False: warm-up has no callers."""
        return False

    def frame(self) -> CallFrame:
        return self._frame
