"""A worker process: started, talked to, watched; and the link to it.

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

from charonia.server.backends.python.codec import log_of_model
from charonia.server.backends.python.environment import SERVER_ENVIRONMENT, Environment
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
"""Time that a process may live on without its connection, when it is of no use."""

LAST_READS_MAX = 64
"""Reads of what an ended process has left in the socket: more than its buffers hold."""

RELEASES_HELD_MAX = 8
"""References to the worker's regions that were dropped and wait for the next message; more are told at once."""

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
        self.pool = RegionPool(forwards=True)
        self.pool.exports_gpu = takes_gpu
        self._on_message = on_message
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._mappings = Mappings(forwards=True)
        self._receiver = Receiver(self._mappings, self.pool)
        self._unsent: list[bytes | bytearray | memoryview] = []
        self._unsent_fds: list[int] = []
        self._lines: deque[str] = deque(maxlen=OUTPUT_LINES_MAX)
        self._partial = b""
        self._is_ended = False
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._kill_reason = ""
        self._waiter: asyncio.Task[None] | None = None
        # Two connections, one in each direction: a reader of a shared one would be woken by every send.
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

    def __repr__(self) -> str:
        """Return e.g. `<WorkerProcess 'm_0_0' pid=4711 running unsent=0>`."""
        state = "ended" if self._is_ended else "running"
        return f"<WorkerProcess '{self.name}' pid={self.pid} {state} unsent={len(self._unsent)}>"

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
            with contextlib.suppress(ProcessLookupError, PermissionError):  # none is left
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
            for message in self._receiver.feed(data, fds):
                if message.header[0] == "log":
                    log_of_model(self.name, *message.header[1:])
                else:
                    self._on_message(message)
        except ChannelError as error:
            self.kill(f"it sent something that cannot be read: {error}")
            return False
        except Exception as error:  # what waits for the worker would wait for ever
            _log.exception("a message of the worker process of '%s' cannot be handled", self.name)
            self.kill(f"the server met a fault of its own with one of its messages: {type(error).__name__}: {error}")
            return False
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


class WorkerLink:
    """Messages to one worker process, and the references to shared memory that both ends drop with them.

    Attributes:
        process: The process.
        is_open: Whether it is still the one to talk to.
    """

    __slots__ = ("_freed", "_released", "is_open", "process")

    def __init__(self, process: WorkerProcess) -> None:
        self.process = process
        self.is_open = True
        self._released: list[int] = []  # regions and handles of the worker that nothing here refers to
        self._freed: list[int] = []  # regions of ours

    def outgoing(self) -> Outgoing:
        """Return an empty message to place tensors in."""
        return Outgoing(self.process.pool)

    def send(self, header: tuple[object, ...], outgoing: Outgoing | None = None, *, at_once: bool = False) -> None:
        """Send a message that ends with the dropped references.

        Args:
            header: Kind and content.
            outgoing: Its tensors.
            at_once: Whether no other is likely to follow in the same round of the event loop.

        Raises:
            ChannelError: It cannot be written.
        """
        released, freed = self._released.copy(), self._freed
        self.process.send((*header, released, freed), outgoing, at_once=at_once)
        # In place: finalizers of arrays append to this list, perhaps in other threads.
        del self._released[: len(released)]
        self._freed = []

    def release(self, region: int) -> None:
        """Drop the reference to a region of the worker. Callable from any thread."""
        self._released.append(region)

    def release_handle(self, export_id: int) -> None:
        """Drop the reference to a tensor of a GPU that the worker has exported. Callable from any thread.

        The worker is told soon, not with the next message: GPU memory is scarce, and the worker may be idle for long.
        """
        self._released.append(export_id)
        self.process.soon(self._release)

    def _release(self) -> None:
        if self.is_open and self._released:
            self.send(("release",))

    def note(self, released: list[int], freed: list[int]) -> None:
        """Note what came with a message: references to ours that were dropped, and regions that the worker freed.

        To be called when the message's own tensors have been found.
        """
        self._freed += self.process.pool.release(released)
        self.process.drop(freed)

    def flush(self) -> None:
        """Tell the worker of dropped references if many have gathered: one that only sends would allocate ever more."""
        if len(self._released) >= RELEASES_HELD_MAX:
            self.send(("release",))


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
