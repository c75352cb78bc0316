"""A worker process: start, messages and exit; and the link to it.

The exit of the process counts, not the end of its connection: a child process of the model may keep copies of its
descriptors open. Where pidfd is available, it reports the exit to the event loop; elsewhere the end of the connection
is the signal. The worker leads a process group of its own, so that its children end with it, and also when the server
is killed.

The functions of one file share a process: each is a thread in it, with its own connection. A function that is loaded
again gets a new process, which the others join when they are loaded again, so new code never runs beside old code. When
the process ends, all its functions are started again, together in another one.
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
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

import psutil

from charonia.core.errors import invalid
from charonia.server.backends.workers.codec import log_of_model
from charonia.server.backends.workers.reaper import reaper
from charonia.server.backends.workers.template import THREAD_VARIABLES, ForkedProcess, WorkerTemplate
from charonia.server.channel.channel import Incoming, Outgoing
from charonia.server.channel.end import SOCKET_BYTES, ChannelEnd, TensorLink
from charonia.server.channel.regions import RegionPool
from charonia.server.machine.cores import bound_to

ANSWER_S_MAX = 120.0
"""Time that a file has to be imported and to answer."""

EXIT_S_MAX = 5.0
"""Time that a process has to exit when its last function has left."""

SCRIPT = Path(__file__).parents[1] / "python" / "worker" / "script.py"

Start = Callable[[tuple[str, ...], tuple[int, ...]], "subprocess.Popen[bytes]"]
"""Starts a process, with arguments of the script and descriptors that it inherits."""


class SharedProcess:
    """A process.

    Attributes:
        models: The models that have joined, also those that have left.
        count: Functions in it now.
    """

    def __init__(self, start: Start) -> None:
        self.models: set[str] = set()
        self.count = 0
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.popen = start(("shared", str(theirs.fileno())), (theirs.fileno(),))
        self._ending: asyncio.Task[None] | None = None

    @property
    def has_ended(self) -> bool:
        return self.popen.returncode is not None or self._ending is not None

    def join(self, receiving: socket.socket, sending: socket.socket) -> "JoinedThread":
        """Start a thread with these ends of a connection. Raises OSError: The process has ended."""
        socket.send_fds(self._control, [b"+"], [receiving.fileno(), sending.fileno()])
        self.count += 1
        return JoinedThread(self)

    def leave(self) -> None:
        """A thread has ended; with the last one, so does the process."""
        self.count -= 1
        if not self.count:
            self._control.close()
            self._ending = asyncio.get_running_loop().create_task(self._end())

    async def _end(self) -> None:
        try:
            await asyncio.to_thread(self.popen.wait, EXIT_S_MAX)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.popen.pid, 9)
            await asyncio.to_thread(self.popen.wait)
        reaper.unregister(self.popen.pid)
        if self.popen.stdout is not None:
            self.popen.stdout.close()


class JoinedThread:
    """A thread in a shared process, with what is used of `subprocess.Popen`.

    Attributes:
        pidfd: Its pidfd, which the caller closes.
        stdout: What the process writes: whichever of its functions reads first gets it.
    """

    def __init__(self, shared: SharedProcess) -> None:
        self.shared = shared
        self.pid = shared.popen.pid
        self.pidfd = os.pidfd_open(self.pid)
        output = shared.popen.stdout
        assert output is not None
        self.stdout: IO[bytes] = open(os.dup(output.fileno()), "rb", 0)  # noqa: SIM115 # its owner closes it

    @property
    def returncode(self) -> int | None:
        return self.shared.popen.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        return self.shared.popen.wait(timeout)


class SharedProcesses:
    """The processes in use, by what their functions have in common."""

    def __init__(self) -> None:
        self._current: dict[Hashable, SharedProcess] = {}

    def of(self, key: Hashable, model: str, start: Start) -> SharedProcess:
        """Return the process that an instance of a model joins.

        Args:
            key: What the functions of a process have in common.
        """
        found = self._current.get(key)
        if found is None or found.has_ended or model in found.models:
            self._current = {other: each for other, each in self._current.items() if not each.has_ended}
            found = self._current[key] = SharedProcess(start)
        found.models.add(model)
        return found


_log = logging.getLogger(__name__)

OUTPUT_LINES_MAX = 50
"""Last lines of a worker's output for error messages."""

OUTPUT_LINE_BYTES_MAX = 8192
"""A longer line of output is cut."""

TAIL_CHARS_MAX = 16 * 1024
"""Error messages contain at most this much, the end of the output."""

KILL_WAIT_S = 5.0
"""Time limit for a killed process to exit."""

COMMON_S_MAX = 60.0
"""Time after which memory that processes have in common is measured again, which takes milliseconds."""

DISCONNECTED_S_MAX = 1.0
"""Time after which a process without its connection is killed."""

LAST_READS_MAX = 64
"""Reads of the remaining data of an ended process: more than the socket's buffers hold."""


@dataclass(frozen=True, slots=True)
class Environment:
    """An interpreter.

    Attributes:
        folder: The environment that it belongs to, None for the server's own interpreter.
        template: The process that workers in it are forked from, None where each one starts the interpreter.
    """

    python: str = sys.executable
    folder: Path | None = None
    template: WorkerTemplate | None = None

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of the interpreter.

        A worker imports nothing from the current folder. With `-P`, which Python has since 3.11, nor do the processes
        that its models spawn.
        """
        return ("-P",) if self.folder is None else ()

    def variables(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variables of a process in it, without those of other environments."""
        if self.folder is None:
            return dict(inherited)
        variables = {k: v for k, v in inherited.items() if k not in ("PYTHONHOME", "PYTHONPATH", "CONDA_PREFIX")}
        variables["VIRTUAL_ENV"] = str(self.folder)
        variables["PATH"] = os.pathsep.join([str(self.folder / "bin"), inherited.get("PATH", os.defpath)])
        return variables


SERVER_ENVIRONMENT = Environment()
"""The server's own interpreter."""


class WorkerProcess:
    """One worker process. Not thread-safe: use it on the event loop's thread.

    Args:
        threads: Threads of its numeric libraries, unless environment variables say otherwise.
        cores: Cores that it and its children are bound to, empty for any.
        takes_gpu: Whether it gets tensors in GPU memory without a copy.
        shared: Returns the process to run in as a thread, None for a process of its own.
        on_message: Called with each message except log lines.
        on_end: Called once with the reason when the process has ended or was abandoned.
    """

    def __init__(
        self,
        name: str,
        *,
        environment: Environment = SERVER_ENVIRONMENT,
        threads: int = 1,
        cores: Sequence[int] = (),
        takes_gpu: bool = False,
        shared: Callable[[Start], SharedProcess] | None = None,
        on_message: Callable[[Incoming], None],
        on_end: Callable[[str], None],
    ) -> None:
        self.name = name
        self._on_message = on_message
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._lines: deque[str] = deque(maxlen=OUTPUT_LINES_MAX)
        self._partial = b""
        self._is_ended = False
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._kill_reason = ""
        self._waiter: asyncio.Task[None] | None = None
        # One connection in each direction: with a shared one, every send would wake the reader.
        ours, their_input = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        our_input, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        for end in (ours, their_input, our_input, theirs):
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                end.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)
        ours.setblocking(False)
        our_input.setblocking(False)
        # Libraries prefer their own variable to OMP_NUM_THREADS, which users set for all of them.
        share = os.environ.get("OMP_NUM_THREADS", str(threads))
        variables = {**dict.fromkeys(THREAD_VARIABLES, share), **environment.variables(os.environ)}
        variables["PYTHONUNBUFFERED"] = "1"
        self._is_forked = environment.template is not None
        self._common_bytes = 0  # what is others' share of common memory
        self._common_until_s = 0.0
        with contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            undo.callback(our_input.close)
            with their_input, theirs:
                self._process: subprocess.Popen[bytes] | ForkedProcess | JoinedThread
                start = partial(_start, environment, variables, cores)
                if environment.template is not None:
                    self._process = environment.template.fork(their_input, theirs, variables, cores)
                elif shared is not None:
                    self._process = shared(start).join(their_input, theirs)
                else:
                    numbers = (their_input.fileno(), theirs.fileno())
                    self._process = start(tuple(map(str, numbers)), numbers)
            undo.pop_all()
        try:
            reaper.watch(self._process.pid)
        except OSError as error:  # the worker runs without it
            _log.warning("what %s starts will outlive a server that is killed: %s", name, error)
        output = self._process.stdout
        if output is None:
            raise RuntimeError("the worker process has no output pipe")
        self._output: IO[bytes] = output
        os.set_blocking(self._output.fileno(), False)
        self._channel = ChannelEnd(
            name, ours, our_input, on_message=self._take, on_broken=self.kill, on_end=self._disconnected
        )
        self.pool.exports_gpu = takes_gpu
        self._loop.add_reader(self._output.fileno(), self._output_readable)
        self._pidfd = _open_pidfd(self.pid) if isinstance(self._process, subprocess.Popen) else self._process.pidfd
        if self._pidfd is not None:
            self._loop.add_reader(self._pidfd, self._exited)

    def __repr__(self) -> str:
        """Return e.g. `<WorkerProcess 'm_0_0' pid=4711 running unsent=0>`."""
        state = "ended" if self._is_ended else "running"
        return f"<WorkerProcess '{self.name}' pid={self.pid} {state} unsent={self.unsent}>"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def unsent(self) -> int:
        return len(self._channel.unsent)

    @property
    def pool(self) -> RegionPool:
        return self._channel.pool

    def resident_bytes(self) -> int:
        """Return the resident memory of the process, with its share only of what forks of a template have in common."""
        try:
            process = psutil.Process(self._process.pid)
            resident = int(process.memory_info().rss)
            if self._is_forked and self._loop.time() >= self._common_until_s:
                self._common_until_s = self._loop.time() + COMMON_S_MAX
                self._common_bytes = resident - int(process.memory_full_info().pss)
            if isinstance(self._process, JoinedThread):
                return resident // max(1, self._process.shared.count)
        except psutil.Error:
            return 0
        return max(0, resident - self._common_bytes)

    def cpu_seconds(self) -> float:
        """Return the CPU time of the process so far."""
        try:
            times = psutil.Process(self._process.pid).cpu_times()
            return float(times.user + times.system)
        except psutil.Error:
            return 0.0

    def send(self, header: tuple[object, ...], outgoing: Outgoing | None = None, *, at_once: bool = False) -> None:
        self._channel.send(header, outgoing, at_once=at_once)

    def soon(self, action: Callable[[], None]) -> None:
        """Run an action on the event loop's thread. Thread-safe, even when the loop is closed."""
        with contextlib.suppress(RuntimeError):  # it is closed, and the worker ends with it
            self._loop.call_soon_threadsafe(action)

    def drop(self, regions: list[int]) -> None:
        self._channel.drop(regions)

    def kill(self, reason: str) -> None:
        """Kill the process; `on_end` gets this reason."""
        self._kill_reason = self._kill_reason or reason
        self._kill_group()

    async def stop(self, timeout_s: float) -> None:
        """Ask the worker to finalize and exit; kill it when that takes too long."""
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
        if not self._is_ended and self._process.returncode is None:  # not reaped yet, so the pid is not reused
            with contextlib.suppress(ProcessLookupError, PermissionError):  # none is left
                os.killpg(self._process.pid, signal.SIGKILL)

    def _take(self, message: Incoming) -> None:
        if message.header[0] == "log":
            log_of_model(self.name, *message.header[1:])
        elif message.header[0] == "left":
            self._loop.call_soon(self._reaped, 0)  # not while the connection is read
        else:
            self._on_message(message)

    def _disconnected(self) -> None:
        if isinstance(self._process, JoinedThread):
            self._loop.call_later(DISCONNECTED_S_MAX, self._reaped, None)
            return
        self._loop.call_later(DISCONNECTED_S_MAX, self._kill_group)
        if self._pidfd is None:
            self._waiter = self._loop.create_task(self._wait())

    def _exited(self) -> None:
        """The process has exited and is not reaped yet."""
        self._kill_group()
        for _ in range(LAST_READS_MAX):  # its last message may be an answer
            if not self._channel.read():
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
            reaper.unregister(self._process.pid)
        self._gone.set_result(None)
        self._loop.remove_reader(self._output.fileno())
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        self._output.close()
        self._channel.close()
        if isinstance(self._process, JoinedThread):
            self._process.shared.leave()

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


class WorkerLink(TensorLink):
    """Sends messages to one worker process, with the dropped references to shared memory.

    Attributes:
        is_open: Whether it is still the current worker.
    """

    def __init__(self, process: WorkerProcess) -> None:
        super().__init__(process)
        self.process = process

    def release_handle(self, export_id: int) -> None:
        """Drop the reference to a GPU tensor that the worker has exported. Thread-safe.

        The worker is notified soon, not with the next message: GPU memory is scarce, and the worker may stay idle.
        """
        self.release(export_id)
        self.process.soon(self._release)

    def _release(self) -> None:
        if self.is_open and self._released:
            self.send(("release",))


def _start(
    environment: Environment,
    variables: dict[str, str],
    cores: Sequence[int],
    arguments: tuple[str, ...],
    descriptors: tuple[int, ...],
) -> "subprocess.Popen[bytes]":
    arguments = (str(SCRIPT), *arguments, str(os.getpid()))
    with bound_to(cores):
        # Not in a thread pool: the worker is killed when the thread that forked it ends.
        return subprocess.Popen(
            [environment.python, *environment.flags, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=descriptors,
            env=variables,
            start_new_session=True,
        )


def _open_pidfd(pid: int) -> int | None:
    """Return a pidfd, which becomes readable when the process exits, None where it is not available."""
    if sys.platform != "linux":
        return None
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # an old kernel or library, or a sandbox that forbids it
        return None


def describe_exit(status: int | None) -> str:
    """Describe how a process ended, by its `Popen` return code."""
    if status is None:
        return "the worker process closed its connection, and how it ended is not known"
    if status < 0:
        name = signal.Signals(-status).name if -status in set(signal.Signals) else str(-status)
        hint = ": often the system's answer to a lack of memory" if -status == signal.SIGKILL else ""
        return f"the worker process was ended by {name}{hint}"
    return f"the worker process exited with status {status}"


async def ask_worker(
    name: str,
    environment: Environment,
    question: tuple[object, ...],
    *,
    failed: str,
    lost: str,
    late: str,
    limit_s: float = ANSWER_S_MAX,
) -> str:
    """Return the answer of a worker process that ends afterwards.

    Args:
        failed: Begins the error for an exception in the model's code.
        lost: Begins the error for a process that ends without an answer.
        late: Begins the error for a process that does not answer in time.

    Raises:
        ServingError: INVALID_ARG, one of these.
    """
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def message(received: Incoming) -> None:
        kind, text = received.header[:2]
        if not answer.done():
            if kind == "completed":
                answer.set_result(text)
            else:
                answer.set_exception(invalid(f"{failed}: {text}"))

    def end(reason: str) -> None:
        if not answer.done():
            answer.set_exception(invalid(f"{lost}: {reason}"))

    process = WorkerProcess(name, environment=environment, on_message=message, on_end=end)
    try:
        process.send(question)
        return await asyncio.wait_for(answer, limit_s)
    except TimeoutError:
        raise invalid(f"{late} within {limit_s:g} s") from None
    finally:
        process.kill("it has answered")
        await process.stop(0)
