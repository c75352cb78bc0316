"""A template, as the server sees it: a process with an imported library or model, which workers are forked from.

The first model that needs it starts the template and waits for the import; each worker after that is there in
milliseconds, and shares the memory of the import with the others. A worker is still a process of its own: threads and
other settings of the library are those of its model, and when it ends, no other does. The workers outlive a template
that ends; another one is started then, as long as there are models that need it.
"""

import asyncio
import contextlib
import json
import logging
import marshal
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from charonia.core.errors import internal

_log = logging.getLogger(__name__)

IMPORT_S_MAX = 300.0
"""Time limit of the import."""

FORK_S_MAX = 10.0
"""Time limit of a fork, for which the event loop waits; it takes milliseconds."""

EXIT_S_MAX = 0.5
"""Time that a template which has closed its connection has to exit by itself."""

IDLE_S = 60.0
"""Time for which a template stays when no model needs it: a model that is reloaded does without another import."""

OUTPUT_BYTES_MAX = 4096
"""An error shows the end of the output of a template that has ended, at most this much."""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Environment variables with the number of threads of numeric libraries, 1 in a template: OpenBLAS would start its own
when it is imported, and they would be missing in a fork."""

SCRIPT = Path(__file__).parents[1] / "python" / "worker" / "template.py"
"""What a template runs."""

_MESSAGE_BYTES_MAX = 64 * 1024


class ForkedProcess:
    """A process that a template has forked, with what is used of `subprocess.Popen`.

    Attributes:
        pidfd: Its pidfd, which the caller closes.
        stdout: What it writes.
        returncode: Its status, once it was waited for; None before.
    """

    def __init__(self, template: "WorkerTemplate", pid: int, pidfd: int, stdout: IO[bytes]) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self.stdout = stdout
        self.returncode: int | None = None
        self._template = template

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the process, which has ended, and return its status; None where its template has ended as well."""
        if self.returncode is None:
            status = self._template.wait(self.pid)
            self.returncode = 0 if status is None else status  # reaped by init: its number is free
            return status
        return self.returncode


class WorkerTemplate:
    """Use it on the event loop's thread.

    Args:
        name: What it is a template for, for messages.
        modules: What it imports.
        variables: Its environment variables, in addition to those of this process.
        model: File, folder of the version, folder and name of a model to import, empty for none.
        python: Its interpreter, with flags.
        inherited: Environment variables in place of those of this process.
    """

    def __init__(
        self,
        name: str,
        modules: Sequence[str],
        variables: Mapping[str, str],
        *,
        model: Sequence[str] = (),
        python: Sequence[str] = (sys.executable, "-P"),
        inherited: Mapping[str, str] | None = None,
    ) -> None:
        self._model = tuple(model)
        self._python = tuple(python)
        self._inherited = inherited
        self._name = name
        self._modules = tuple(modules)
        self._variables = dict(variables)
        self._users = 0
        self._ready: asyncio.Future[None] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._output: IO[bytes] | None = None
        self._forked: set[int] = set()
        self._idle: asyncio.TimerHandle | None = None

    @staticmethod
    def is_possible() -> bool:
        """Whether this system has what templates need: Linux of 5.3 or newer."""
        if sys.platform != "linux":
            return False
        try:
            os.close(os.pidfd_open(os.getpid()))
        except (AttributeError, OSError):
            return False
        return True

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    async def acquire(self) -> None:
        """Keep it running until `release`, and wait until it can fork.

        Raises:
            ServingError: INTERNAL when the import fails, with the reason.
        """
        self._users += 1
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        try:
            await asyncio.wait_for(asyncio.shield(self._start()), IMPORT_S_MAX)
        except TimeoutError:
            self.release()
            self._end()
            raise internal(f"the import of {self._name} did not finish within {IMPORT_S_MAX:g} s") from None
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """It is needed once less. It ends a while after it is not needed at all."""
        self._users -= 1
        if not self._users:
            self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._end)

    def fork(
        self, receiving: socket.socket, sending: socket.socket, variables: dict[str, str], cores: Sequence[int]
    ) -> ForkedProcess:
        """Fork a worker.

        Args:
            cores: Cores that it is bound to, empty for any.

        Raises:
            OSError: The template does not run; if it is needed, it is being started.
        """
        ready = self._start()
        if not ready.done():
            raise BlockingIOError(f"{self._name} is being imported")
        reading, writing = os.pipe()
        try:
            order = ("fork", variables, list(cores))
            descriptors = (receiving.fileno(), sending.fileno(), writing)
            pid, pidfds = self._ask(order, descriptors)
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self._forked.add(pid)
        return ForkedProcess(self, pid, pidfds[0], open(reading, "rb", 0))  # its owner closes it

    def wait(self, pid: int) -> int | None:
        """Return the status of a process that was forked and has ended, None for one of an earlier template."""
        if pid not in self._forked:
            return None
        self._forked.discard(pid)
        try:
            status, _ = self._ask(("wait", pid))
        except OSError:
            return None
        return int(status)

    async def aclose(self) -> None:
        """End it now."""
        if self._idle is not None:
            self._idle.cancel()
        self._end()

    def _ask(self, order: tuple[Any, ...], descriptors: Sequence[int] = ()) -> tuple[Any, list[int]]:
        connection = self._connection
        if connection is None:
            raise BrokenPipeError(f"the process that has imported {self._name} has ended")
        try:
            socket.send_fds(connection, [marshal.dumps(order)], descriptors)
            answer, received, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES_MAX, 1)
            if not answer:
                raise BrokenPipeError(f"the process that has imported {self._name} has ended")
        except OSError:  # a time limit is one, too
            self._lost()
            raise
        return marshal.loads(answer), received

    def _start(self) -> asyncio.Future[None]:
        """Start it unless it runs; return what is done when it can fork."""
        if self._ready is not None:
            return self._ready
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(FORK_S_MAX)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 # closed when the process has ended
        imported = json.dumps([self._modules, self._model])
        with theirs:
            # Not in a thread pool: the template is killed when the thread that forked it ends.
            self._process = subprocess.Popen(
                [*self._python, str(SCRIPT), str(theirs.fileno()), str(os.getpid()), imported],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                env={
                    **(os.environ if self._inherited is None else self._inherited),
                    **dict.fromkeys(THREAD_VARIABLES, "1"),
                    **self._variables,
                },
                start_new_session=True,
            )
        self._connection = ours
        self._ready = loop.create_future()
        loop.add_reader(ours.fileno(), self._readable)
        return self._ready

    def _readable(self) -> None:
        """It has imported what it should, or could not, or has ended."""
        if self._connection is None or self._ready is None:
            return
        try:
            message = self._connection.recv(_MESSAGE_BYTES_MAX)
        except OSError:
            message = b""
        kind, *reasons = marshal.loads(message) if message else ("ended",)
        if kind == "ready":
            self._ready.set_result(None)
        else:
            self._lost(*reasons)

    def _lost(self, reason: str = "") -> None:
        """It has failed, or ended by itself: start it again if it once ran and is needed."""
        ready, process, output = self._ready, self._process, self._output
        if ready is None or process is None or output is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs, and is killed
            process.wait(EXIT_S_MAX)
        size = os.fstat(output.fileno()).st_size
        tail = os.pread(output.fileno(), OUTPUT_BYTES_MAX, max(0, size - OUTPUT_BYTES_MAX)).decode(errors="replace")
        self._end()
        if ready.done():
            _log.error("the process that has imported %s has ended; its workers go on", self._name)
            if self._users:
                self._start()
            return
        why = reason or f"the process ended with status {process.returncode}; its last output:\n{tail}"
        ready.set_exception(internal(f"{self._name} cannot be imported: {why}"))
        ready.exception()  # nobody may be waiting

    def _end(self) -> None:
        process, connection, output = self._process, self._connection, self._output
        self._process = self._connection = self._output = self._ready = None
        self._forked.clear()
        if process is None or connection is None or output is None:
            return
        asyncio.get_running_loop().remove_reader(connection.fileno())
        connection.close()
        output.close()
        process.kill()  # it has nothing to lose, and is gone at once
        process.wait()
