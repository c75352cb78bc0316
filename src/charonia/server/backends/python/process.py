"""A worker process: started, talked to, watched.

The end of the process is what counts, not the end of its connection: a child that the model has started may hold copies
of its descriptors for long. Where the system can tell of it (pidfd), the event loop is told; elsewhere the end of the
connection is the sign. What the worker had started itself ends with it: it leads a process group of its own, which is
also ended when the server is killed.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import psutil

from charonia.server.backends.python.environment import SERVER_ENVIRONMENT, Environment
from charonia.server.backends.python.model_log import log_of_model
from charonia.server.backends.python.reaper import reaper
from charonia.server.backends.python.worker.charonia_channel import (
    FDS_MAX,
    Incoming,
    Outgoing,
    Receiver,
    receive,
    remaining,
    send_some,
)
from charonia.server.backends.python.worker.charonia_regions import ChannelError, Mappings, RegionPool
from charonia.server.machine.cores import bound_to

_log = logging.getLogger(__name__)

OUTPUT_LINES_MAX = 50
"""Last lines of a worker's output that are kept for error messages."""

OUTPUT_LINE_BYTES_MAX = 8192
"""A longer line of output is cut."""

TAIL_CHARS_MAX = 16 * 1024
"""Of more output than this, error messages have the end."""

SOCKET_BYTES = 1024 * 1024
"""Buffer of the socket in each direction: a batch of small tensors fits."""

KILL_WAIT_S = 5.0
"""Time a killed process has to vanish."""

DISCONNECTED_S_MAX = 1.0
"""Time that a process may live on without its connection, of no use to anybody."""

LAST_READS_MAX = 64
"""Reads of what an ended process has left in the socket: more than its buffers hold."""

_SCRIPT = Path(__file__).parent / "worker" / "charonia_worker.py"
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class WorkerProcess:
    """One worker process. Everything happens on the event loop's thread.

    Args:
        name: Instance name, for logs.
        environment: Interpreter to run.
        threads: Threads that numeric libraries in it may use, unless the environment says otherwise.
        cores: Cores that it and what it starts run on, empty for any.
        takes_gpu: Whether it gets tensors of GPUs as they are.
        on_message: Called with each message but log lines.
        on_end: Called once with the reason when the process has ended or was given up.
    """

    def __init__(
        self,
        name: str,
        *,
        environment: Environment = SERVER_ENVIRONMENT,
        threads: int = 1,
        cores: Sequence[int] = (),
        takes_gpu: bool = False,
        on_message: Callable[[Incoming], None],
        on_end: Callable[[str], None],
    ) -> None:
        self.name = name
        self.pool = RegionPool(lends=True)
        self.pool.lends_gpu = takes_gpu
        self._on_message = on_message
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._mappings = Mappings(lends=True)
        self._receiver = Receiver(self._mappings, self.pool)
        self._unsent: list[bytes | bytearray | memoryview] = []
        self._unsent_fds: list[int] = []
        self._lines: deque[str] = deque(maxlen=OUTPUT_LINES_MAX)
        self._partial = b""
        self._is_ended = False
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._kill_reason = ""
        self._waiter: asyncio.Task[None] | None = None
        # Two connections, one in each direction: who waits at one is woken whenever the other end takes what was sent.
        ours, their_input = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        our_input, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        for end in (ours, their_input, our_input, theirs):
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                end.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)
        ours.setblocking(False)
        our_input.setblocking(False)
        self._sending, self._receiving = ours, our_input
        variables = {**dict.fromkeys(_THREAD_VARIABLES, str(threads)), **environment.variables(os.environ)}
        variables["PYTHONUNBUFFERED"] = "1"
        arguments = (str(_SCRIPT), str(their_input.fileno()), str(theirs.fileno()), str(os.getpid()))
        with their_input, theirs, bound_to(cores):
            # Forked by this thread, not by a pool's: the worker is killed when the thread that forked it ends.
            self._process = subprocess.Popen(
                [environment.python, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(their_input.fileno(), theirs.fileno()),
                env=variables,
                start_new_session=True,
            )
        try:
            reaper.watch(self._process.pid)
        except OSError as error:  # the worker itself does not need it
            _log.warning("what %s starts will outlive a server that is killed: %s", name, error)
        output = self._process.stdout
        if output is None:
            raise RuntimeError("the worker process has no output pipe")
        self._output: IO[bytes] = output
        os.set_blocking(self._output.fileno(), False)
        self._loop.add_reader(self._receiving.fileno(), self._readable)
        self._loop.add_reader(self._output.fileno(), self._output_readable)
        self._pidfd = _open_pidfd(self._process.pid)
        if self._pidfd is not None:
            self._loop.add_reader(self._pidfd, self._exited)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def unsent(self) -> int:
        """Number of pieces of messages that wait for the worker to read."""
        return len(self._unsent)

    def resident_bytes(self) -> int:
        """Return the resident memory of the process."""
        try:
            return int(psutil.Process(self._process.pid).memory_info().rss)
        except psutil.Error:
            return 0

    def send(self, header: tuple[object, ...], outgoing: Outgoing | None = None, *, at_once: bool = False) -> None:
        """Send a message, together with those that follow in the same round of the event loop.

        Args:
            header: Kind and content.
            outgoing: Its tensors.
            at_once: Send it, and what waits to be sent, now.

        Raises:
            ChannelError: It is too large.
        """
        outgoing = outgoing or Outgoing(self.pool)
        buffers = outgoing.frame(header)
        if not (at_once or self._unsent):
            self._loop.call_soon(self._write)
        self._unsent += buffers
        # A descriptor may arrive before its message, never after it.
        self._unsent_fds += outgoing.fds
        if at_once:
            self._write()

    def soon(self, action: Callable[[], None]) -> None:
        """Have something done on the event loop's thread. Callable from any thread, also when there is no loop left."""
        with contextlib.suppress(RuntimeError):  # it is closed, and the worker ends with it
            self._loop.call_soon_threadsafe(action)

    def drop(self, regions: list[int]) -> None:
        """Unmap regions that the worker has given up."""
        self._mappings.drop(regions)

    def kill(self, reason: str) -> None:
        """End the process at once; `on_end` gets this reason."""
        self._kill_reason = self._kill_reason or reason
        self._kill_group()

    async def stop(self, timeout_s: float) -> None:
        """Ask the worker to finalize and end; kill it when that takes too long."""
        if self._is_ended:
            return
        self._on_end = lambda _: None
        if not self._kill_reason:
            self.send(("finalize",))
            await asyncio.wait([self._gone], timeout=timeout_s)
            if not self._is_ended:
                _log.warning("%s did not finalize within %g s and is killed", self.name, timeout_s)
                self._kill_group()
        await asyncio.wait([self._gone], timeout=KILL_WAIT_S)
        self._end()

    def _kill_group(self) -> None:
        """Kill the process and its children."""
        if self._process.returncode is None:  # not waited for yet: the number is still its own
            with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left to be killed
                os.killpg(self._process.pid, signal.SIGKILL)

    def _write(self) -> None:
        if self._is_ended:
            return
        try:
            while self._unsent:
                sent = send_some(self._sending, self._unsent, self._unsent_fds)
                self._unsent_fds = self._unsent_fds[FDS_MAX:]
                self._unsent = remaining(self._unsent, sent)
        except BlockingIOError:
            self._loop.add_writer(self._sending.fileno(), self._writable)
        except (BrokenPipeError, ConnectionResetError):  # the worker has gone; reading finds out why
            self._unsent.clear()
        except OSError as error:
            self._unsent.clear()
            self.kill(f"a batch cannot be sent to it: {error}")

    def _writable(self) -> None:
        self._loop.remove_writer(self._sending.fileno())
        self._write()

    def _readable(self) -> None:
        if self._read() is False:
            self._loop.remove_reader(self._receiving.fileno())
            self._loop.call_later(DISCONNECTED_S_MAX, self._kill_group)
            if self._pidfd is None:
                self._waiter = self._loop.create_task(self._wait())

    def _read(self) -> bool | None:
        """Take in what can be read now; return None when there is nothing, False at the end of the connection."""
        try:
            data, fds = receive(self._receiving)
        except BlockingIOError:
            return None
        except OSError:
            return False
        if not data:
            return False
        try:
            messages = self._receiver.feed(data, fds)
        except ChannelError as error:
            self.kill(f"it sent something that cannot be read: {error}")
            return False
        for message in messages:
            if message.header[0] == "log":
                log_of_model(self.name, *message.header[1:])
            else:
                self._on_message(message)
        return True

    def _exited(self) -> None:
        """The process has ended and was not waited for yet."""
        self._kill_group()
        for _ in range(LAST_READS_MAX):  # an answer may have been its last act
            if not self._read():
                break
        self._reaped(self._process.wait())

    async def _wait(self) -> None:
        try:
            status = await asyncio.to_thread(self._process.wait, KILL_WAIT_S)
        except subprocess.TimeoutExpired:
            status = None
        self._reaped(status)

    def _reaped(self, status: int | None) -> None:
        if self._is_ended:
            return
        self._output_readable()
        reason = self._kill_reason or describe_exit(status)
        tail = "\n".join([*self._lines, *([self._partial.decode(errors="replace")] if self._partial else [])])
        tail = tail[-TAIL_CHARS_MAX:]
        self._end()
        self._on_end(f"{reason}; its last output:\n{tail}" if tail else reason)

    def _end(self) -> None:
        if self._is_ended:
            return
        self._is_ended = True
        if self._process.returncode is not None:
            reaper.forget(self._process.pid)
        self._gone.set_result(None)
        for fd in (self._receiving.fileno(), self._output.fileno()):
            self._loop.remove_reader(fd)
        self._loop.remove_writer(self._sending.fileno())
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        self._sending.close()
        self._receiving.close()
        self._output.close()
        self._receiver.close()
        self._mappings.close()
        self.pool.close()

    def _output_readable(self) -> None:
        try:
            data = self._output.read(64 * 1024)
        except (BlockingIOError, ValueError):
            return
        if data is None:
            return
        if not data:
            self._loop.remove_reader(self._output.fileno())
            return
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > OUTPUT_LINE_BYTES_MAX:
            lines.append(self._partial)
            self._partial = b""
        for line in lines:
            text = line[:OUTPUT_LINE_BYTES_MAX].decode(errors="replace")
            self._lines.append(text)
            _log.info("[%s] %s", self.name, text)


def _open_pidfd(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process ends, or None where there is no such thing."""
    if sys.platform != "linux":
        return None
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # an old kernel or library, or a sandbox that forbids it
        return None


def describe_exit(status: int | None) -> str:
    """Return in words how a process ended, from its `Popen` return code."""
    if status is None:
        return "the worker process closed its connection but did not end"
    if status < 0:
        name = signal.Signals(-status).name if -status in set(signal.Signals) else str(-status)
        hint = ": often the system's answer to a lack of memory" if -status == signal.SIGKILL else ""
        return f"the worker process was ended by {name}{hint}"
    return f"the worker process exited with status {status}"
