"""A `charonia serve` process for tests: free ports, captured log, certain end; and how to wait for other processes."""

import asyncio
import contextlib
import json
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.request import Request, urlopen

import psutil
import pytest
from tests.support import warm_start
from tests.support.fork_server import ForkedCommand

SHAPES = [pytest.param((), id="one-process"), pytest.param(("--front-ends=2",), id="front-ends-apart")]
"""Arguments by which the same server runs in one process, and with front ends in processes of their own."""

Shape = tuple[str, ...]

_T = TypeVar("_T")

_STARTED = re.compile(r"Started (GRPCInferenceService|HTTPService|Metrics Service) at 127\.0\.0\.1:(\d+)")
_SECONDS_MAX = 200.0
"""What is waited for has this time: a busy machine takes a multiple of what an idle one takes."""

_LOOPBACK = ("--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--metrics-address=127.0.0.1")
_FREE_PORTS = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")


def shared_memory_of(pid: int) -> set[str]:
    """Return the files in /dev/shm that a process has open or mapped; what else is there comes and goes."""
    process = psutil.Process(pid)
    used = {mapped.path for mapped in process.memory_maps()} | {opened.path for opened in process.open_files()}
    return {path for path in used if path.startswith("/dev/shm/")}


def started_by(pid: int) -> list[psutil.Process]:
    """Return the processes that a process has started, and those that they have; templates are no part of a server."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if process.cmdline()[:1] != [warm_start.TEMPLATE]:
                found.append(process)
    return found


def eventually(condition: Callable[[], bool], seconds: float = _SECONDS_MAX) -> bool:
    """Wait until a condition holds, and return whether it does within so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


async def until(condition: Callable[[], object], seconds: float = _SECONDS_MAX) -> None:
    """Let the event loop run until a condition holds, which it must within so many seconds."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


def waited_for(look: Callable[[], _T], is_so: Callable[[_T], bool], seconds: float = _SECONDS_MAX) -> _T:
    """Repeat a call until its answer fulfils a condition, and return the answer."""
    deadline = time.monotonic() + seconds
    while not is_so(found := look()):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


class ServeProcess:
    """A server as a user starts it. Use it as a context manager; entering waits until it has started.

    Args:
        repository: Folder that holds model folders, or URI of a store.
        arguments: Further arguments of `charonia serve`.
    """

    def __init__(self, repository: Path | str, *arguments: str) -> None:
        self._arguments = ("serve", f"--model-repository={repository}", *_LOOPBACK, *_FREE_PORTS, *arguments)
        self._process: ForkedCommand | None = None
        self._ports: dict[str, int] = {}
        self._changed = threading.Condition()
        self._lines: list[str] = []

    def __enter__(self) -> Self:
        """Start the server.

        Raises:
            RuntimeError: It ended, or did not start in time; the message holds its log.
        """
        self._process = self._start()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        deadline = time.monotonic() + _SECONDS_MAX
        with self._changed:
            while "Metrics Service" not in self._ports:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    break
                self._changed.wait(0.1)
        if "Metrics Service" not in self._ports:
            self.kill()
            raise RuntimeError(f"the server did not start:\n{self.log}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop the server if the test has not."""
        if self.process.poll() is None:
            self.stop()

    @property
    def process(self) -> ForkedCommand:
        if self._process is None:
            raise RuntimeError("the server was not started")
        return self._process

    @property
    def http(self) -> str:
        """HTTP endpoint as `host:port`."""
        return f"127.0.0.1:{self._ports['HTTPService']}"

    @property
    def grpc(self) -> str:
        """Endpoint of gRPC as `host:port`."""
        return f"127.0.0.1:{self._ports['GRPCInferenceService']}"

    @property
    def metrics(self) -> str:
        """Metrics endpoint as `host:port`."""
        return f"127.0.0.1:{self._ports['Metrics Service']}"

    @property
    def log(self) -> str:
        """What the server wrote to stderr so far."""
        with self._changed:
            return "".join(self._lines)

    def logs(self, text: str, times: int = 1) -> bool:
        """Return whether the log has the text, once it has: lines may arrive after the answer that they are about."""
        with self._changed:
            return self._changed.wait_for(lambda: "".join(self._lines).count(text) >= times, _SECONDS_MAX)

    def ask(self, path: str, document: object = None) -> Any:
        """Return the document that answers a GET, or a POST of a document."""
        body = None if document is None else json.dumps(document).encode()
        with urlopen(Request(f"http://{self.http}{path}", body), timeout=200) as answer:
            return json.load(answer)

    def metrics_page(self) -> str:
        with urlopen(f"http://{self.metrics}/metrics", timeout=200) as page:
            return str(page.read().decode())

    def metric(self, name: str, model: str, **labels: str) -> int:
        """Return the value of a metric of version 1 of a model, with further labels."""
        expected = {"model": model, "version": "1", **labels}
        wanted = "".join(rf'(?=[^}}]*\b{label}="{value}")' for label, value in expected.items())
        found = re.search(rf"^{name}{{{wanted}[^}}]*}} (\S+)$", self.metrics_page(), re.M)
        assert found is not None, f"{name} of {expected}"
        return int(float(found[1]))

    def pending(self, model: str) -> int:
        """Return how many requests wait in the queue of version 1 of a model."""
        return self.metric("nv_inference_pending_request_count", model)

    def begin_to_stop(self) -> None:
        """Tell the server to stop, and return when it does; what it works on may go on."""
        self.process.send_signal(signal.SIGTERM)
        if not self.logs("shutting down"):
            raise RuntimeError(f"the server did not begin to stop:\n{self.log}")

    def stop(self) -> int:
        """Stop the server gracefully and return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        """Wait for the server's end and return its exit status."""
        try:
            status = self.process.wait(_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        self._reader.join(_SECONDS_MAX)
        self.process.stderr.close()
        return status

    def kill(self) -> None:
        self.process.kill()
        self.wait()

    def _start(self) -> ForkedCommand:
        return ForkedCommand(self._arguments)

    def _read(self) -> None:
        for line in self.process.stderr:
            with self._changed:
                self._lines.append(line)
                started = _STARTED.search(line)
                if started is not None:
                    self._ports[started[1]] = int(started[2])
                self._changed.notify_all()


def wait_until_ended(process: psutil.Process) -> None:
    """Wait for the end of a process that is not a child of this one; a zombie counts as ended."""
    deadline = time.monotonic() + _SECONDS_MAX
    with contextlib.suppress(psutil.NoSuchProcess):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{process} goes on")
            time.sleep(0.02)
