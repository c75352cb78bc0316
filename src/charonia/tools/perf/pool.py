"""The processes that send load, seen from the one that measures: start, tell, listen, end."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait

from charonia.core.errors import Code, ServingError, internal
from charonia.tools.perf.api import InputSource, RunSettings
from charonia.tools.perf.messages import Begin, Broken, End, Go, WorkerReady, WorkerSetup
from charonia.tools.perf.samples import Chunk
from charonia.tools.perf.shared_memory import SharedLayout

START_SECONDS_MAX = 60.0
"""Time for all processes to be ready for a level, their connections made."""

BEGIN_DELAY_NS = 5_000_000
"""From the word to begin to the begin, so that every process has heard it."""

END_SECONDS_MAX = 5.0
"""Time for a process to end by itself; then it is killed."""


class WorkerPool:
    """Processes that send load.

    Args:
        settings: The run.
        source: Its input data.
        count: Number of processes.
        layout: Where tensors lie in shared memory, None where they travel in the messages.
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
        """Number of processes."""
        return len(self._processes)

    def prepare(self, begin: Begin) -> None:
        """Let all processes get ready for a load: connections are made, requests are encoded.

        Raises:
            ServingError: A process cannot, for example because a request has no form that can be sent.
        """
        self._tell(begin)
        waiting = set(range(self.count))
        limit = time.monotonic() + START_SECONDS_MAX
        while waiting:
            if time.monotonic() > limit:
                raise internal(f"processes that send load: not ready within {START_SECONDS_MAX:g} s")
            for number, message in self._messages(0.1):
                if isinstance(message, WorkerReady):
                    waiting.discard(number)

    def go(self) -> int:
        """Start the load in all processes at once, and return the monotonic time of its begin."""
        begin_ns = time.monotonic_ns() + BEGIN_DELAY_NS
        self._tell(Go(begin_ns))
        return begin_ns

    def listen(self, seconds: float) -> Iterator[tuple[int, Chunk]]:
        """Yield the chunks that come within this time, each with the number of its process.

        Raises:
            ServingError: A process broke.
        """
        for number, message in self._messages(seconds):
            if isinstance(message, Chunk):
                yield number, message

    def end(self, wait_s: float) -> None:
        """Tell all processes to stop the load; their last chunks say `finished`.

        Args:
            wait_s: How long they wait for answers.
        """
        self._tell(End(wait_s))

    def close(self) -> None:
        """End the processes."""
        for connection in (*self._commands, *self._answers):
            connection.close()
        for process in self._processes:
            try:
                process.wait(END_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, setup: WorkerSetup) -> None:
        # Two sockets, as the worker reads one on its event loop and writes the other from a thread, where it may wait.
        commands, their_commands = socket.socketpair()
        answers, their_answers = socket.socketpair()
        descriptors = [their_commands.fileno(), their_answers.fileno()]
        command = [sys.executable, "-m", "charonia.tools.perf.worker", *map(str, descriptors)]
        # What the parent could import, the child can: it may run from a folder that is on its path.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with their_commands, their_answers:
            self._processes.append(
                # In a group of its own: Ctrl-C, and what `timeout` sends, are for the measuring process, which decides.
                subprocess.Popen(
                    command, pass_fds=descriptors, stdin=subprocess.DEVNULL, env=environment, process_group=0
                )
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
            number = self._answers.index(ready)  # type: ignore[arg-type]  # only ours are waited for
            connection = self._answers[number]
            try:
                message = connection.recv()
            except (EOFError, OSError):
                raise _ended() from None
            if isinstance(message, Broken):
                raise ServingError(Code[message.code], message.message, hint=message.hint)
            yield number, message


@contextmanager
def pool(
    settings: RunSettings, source: InputSource, count: int, layout: SharedLayout | None = None
) -> Iterator[WorkerPool]:
    """Start processes that send load, and end them in any case."""
    processes = WorkerPool(settings, source, count, layout)
    try:
        yield processes
    finally:
        processes.close()


def process_count(most: int, level: float, is_rate: bool, cores: Sequence[int]) -> int:
    """Return how many processes a load is worth.

    One process does some 10,000 requests a second. More of them help where there are cores for them beside those of the
    server, which often runs on the same machine: a quarter of the cores.

    Args:
        most: As many as the user allows.
        level: Largest requests a second, or in flight.
        is_rate: Which of both.
        cores: Those that may be used.
    """
    wanted = level / _RATE_PER_PROCESS if is_rate else level / _REQUESTS_PER_PROCESS
    return max(1, min(most, len(cores) // 4, int(min(wanted, 1e6))))


_RATE_PER_PROCESS = 4000
_REQUESTS_PER_PROCESS = 8


def _ended() -> ServingError:
    return internal("a process that sends load ended unexpectedly", hint="Its error is above.")
