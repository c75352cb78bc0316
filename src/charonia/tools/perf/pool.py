"""The worker processes that send load, and the messages that control them, pickled over a socket pair."""

import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from charonia.core.errors import Code, ServingError, internal
from charonia.python_command import python_module
from charonia.tools.perf.api import InputSource, RunSettings
from charonia.tools.perf.samples import Chunk
from charonia.tools.perf.shared_memory import SharedLayout
from charonia.tools.results.records import LoadLevel


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """First message to a worker.

    Attributes:
        process: Number of the worker, from 0.
        layout: Locations of tensors in shared memory, None if requests contain them.
    """

    settings: RunSettings
    source: InputSource
    process: int
    process_count: int
    layout: SharedLayout | None = None


@dataclass(frozen=True, slots=True)
class Begin:
    """Prepare a load: the reply is `WorkerReady`, and `Go` starts it.

    Attributes:
        request_count: Requests of all workers together; 0 for no limit.
    """

    level: LoadLevel
    request_count: int = 0


@dataclass(frozen=True, slots=True)
class Go:
    """Start the prepared load."""

    begin_ns: int


@dataclass(frozen=True, slots=True)
class End:
    """Stop the load, wait for requests in flight, and send a last `Chunk`.

    Attributes:
        wait_s: Time to wait for answers; requests still in flight are then cancelled.
    """

    wait_s: float


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker has opened its connections and is ready to start."""


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """A worker failed."""

    code: str
    message: str
    hint: str = ""


START_SECONDS_MAX = 60.0
"""Time for all workers to prepare a level, including their connections."""

BEGIN_DELAY_NS = 5_000_000
"""Delay between `Go` and the start, so that every worker has received it."""

END_SECONDS_MAX = 5.0
"""Time for a worker to exit before it is killed."""


class WorkerPool:
    """Worker processes that send load.

    Args:
        layout: Locations of tensors in shared memory, None if requests contain them.
    """

    def __init__(
        self, settings: RunSettings, source: InputSource, count: int, layout: SharedLayout | None = None
    ) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._commands: list[Connection] = []
        self._answers: list[Connection] = []
        for number in range(count):
            self._start(WorkerSetup(settings, source, number, count, layout))

    @property
    def count(self) -> int:
        return len(self._processes)

    def prepare(self, begin: Begin) -> None:
        """Let all workers prepare a load: open connections and encode requests.

        Raises:
            ServingError: A worker failed, for example because a request cannot be encoded.
        """
        self._tell(begin)
        waiting = set(range(self.count))
        limit = time.monotonic() + START_SECONDS_MAX
        while waiting:
            if time.monotonic() > limit:
                raise internal(f"worker processes: not ready within {START_SECONDS_MAX:g} s")
            for number, message in self._messages(0.1):
                if isinstance(message, WorkerReady):
                    waiting.discard(number)

    def go(self) -> int:
        """Start the load in all workers at the same time, and return its monotonic start time."""
        begin_ns = time.monotonic_ns() + BEGIN_DELAY_NS
        self._tell(Go(begin_ns))
        return begin_ns

    def listen(self, seconds: float) -> Iterator[tuple[int, Chunk]]:
        """Yield the chunks that arrive within this time, with the numbers of their workers."""
        for number, message in self._messages(seconds):
            if isinstance(message, Chunk):
                yield number, message

    def end(self, wait_s: float) -> None:
        """Let all workers stop the load; their last chunks are `finished`."""
        self._tell(End(wait_s))

    def close(self) -> None:
        """End the workers."""
        for connection in (*self._commands, *self._answers):
            connection.close()
        for process in self._processes:
            try:
                process.wait(END_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, setup: WorkerSetup) -> None:
        # Two sockets: the worker reads one on its event loop, and a thread of it writes the other, where it may block.
        commands, their_commands = socket.socketpair()
        answers, their_answers = socket.socketpair()
        descriptors = [their_commands.fileno(), their_answers.fileno()]
        command = python_module("charonia.tools.perf.worker", *map(str, descriptors))
        with their_commands, their_answers:
            self._processes.append(
                # In its own process group: Ctrl-C and signals of `timeout` reach the measuring process only.
                subprocess.Popen(command, pass_fds=descriptors, stdin=subprocess.DEVNULL, process_group=0)
            )
        self._commands.append(Connection(commands.detach()))
        self._answers.append(Connection(answers.detach()))
        self._send(self._commands[-1], setup)

    def _tell(self, message: Begin | Go | End) -> None:
        for connection in self._commands:
            self._send(connection, message)

    def _send(self, connection: Connection, message: object) -> None:
        try:
            connection.send(message)
        except OSError:
            raise _ended() from None

    def _messages(self, seconds: float) -> Iterator[tuple[int, object]]:
        for ready in wait(self._answers, seconds):
            number = self._answers.index(ready)  # type: ignore[arg-type]  # `wait` got only these
            connection = self._answers[number]
            try:
                message = connection.recv()
            except (EOFError, OSError):
                raise _ended() from None
            if isinstance(message, WorkerFailed):
                raise ServingError(Code[message.code], message.message, hint=message.hint)
            yield number, message


@contextmanager
def pool(
    settings: RunSettings, source: InputSource, count: int, layout: SharedLayout | None = None
) -> Iterator[WorkerPool]:
    """Start the workers, and end them on exit."""
    processes = WorkerPool(settings, source, count, layout)
    try:
        yield processes
    finally:
        processes.close()


def process_count(most: int, level: float, is_rate: bool, cores: Sequence[int]) -> int:
    """Return the number of workers for a load.

    One worker sends some 10,000 requests per second. The workers use at most a quarter of the cores, because the server
    often runs on the same machine.

    Args:
        level: Highest number of requests per second, or in flight.
        is_rate: Whether `level` is a rate.
    """
    wanted = level / _RATE_PER_PROCESS if is_rate else level / _REQUESTS_PER_PROCESS
    return max(1, min(most, len(cores) // 4, int(min(wanted, 1e6))))


_RATE_PER_PROCESS = 4000
_REQUESTS_PER_PROCESS = 8


def _ended() -> ServingError:
    return internal("a worker process exited unexpectedly", hint="Its error is above.")
