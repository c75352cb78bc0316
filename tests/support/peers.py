"""Charonia and Triton side by side: the same repository, the same requests, the answers compared.

The status and the JSON or protobuf document have to be equal, except for what naturally differs (the texts of errors,
durations, the server's name). Triton is the one that `bench/peers.sh` installs; it has the Python backend
only.
"""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import Any, Self, TypeVar

from tests.support.ports import free_port
from tests.support.process import ServeProcess

PEERS = Path(os.environ.get("CHARONIA_PEERS", Path.home() / ".cache" / "charonia-peers"))
"""Where `bench/peers.sh` puts Triton and its tools."""
TRITON = PEERS / "bin" / "tritonserver"
MODEL_ANALYZER = PEERS / "ma_venv" / "bin" / "model-analyzer"

START_SECONDS_MAX = 240.0
STOP_SECONDS_MAX = 200.0
ANSWER_SECONDS_MAX = 30.0
COUNTED_WITHIN_S = 100.0

_T = TypeVar("_T")


class TritonProcess:
    """A Triton server as a context manager; entering waits until both endpoints answer.

    Args:
        repository: Folder that holds model folders.
        arguments: Further arguments of `tritonserver`.

    Attributes:
        http: HTTP endpoint as `host:port`.
        grpc: gRPC endpoint as `host:port`.
        metrics: Metrics endpoint as `host:port`.
    """

    def __init__(self, repository: Path, *arguments: str) -> None:
        self.http, self.grpc, self.metrics = (f"127.0.0.1:{free_port()}" for _ in range(3))
        self._command = [str(TRITON), f"--model-repository={repository}"]
        for name in ("http", "grpc", "metrics"):
            host, port = getattr(self, name).split(":")
            self._command += [f"--{name}-address={host}", f"--{name}-port={port}"]
        self._command += arguments
        self._stack = ExitStack()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        if self._process is None:
            raise RuntimeError("the server was not started")
        return self._process

    def __enter__(self) -> Self:
        """Start the server.

        Raises:
            RuntimeError: It ended, or did not answer in time; the message holds its log.
        """
        log = self._stack.enter_context(TemporaryFile())
        process = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT)
        self._process = process
        deadline = time.monotonic() + START_SECONDS_MAX
        for endpoint in (self.grpc, self.http, self.metrics):  # it opens them in this order
            while not _is_open(endpoint):
                if process.poll() is not None or time.monotonic() > deadline:
                    process.kill()
                    process.wait()
                    log.seek(0)
                    text = log.read().decode(errors="replace")[-4000:]
                    self._stack.close()  # `__exit__` is not called
                    raise RuntimeError(f"Triton did not start:\n{text}")
                time.sleep(0.05)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._stack.close()


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said to one HTTP request.

    Attributes:
        headers: Headers, names in lower case.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def document(self) -> Any:
        """The body as JSON; for a binary response its JSON part; None where it is no JSON."""
        size = int(self.headers.get("inference-header-content-length", len(self.body)))
        try:
            return json.loads(self.body[:size])
        except ValueError:
            return None


@dataclass(frozen=True, slots=True)
class Pair:
    """Both servers over one repository."""

    ours: ServeProcess
    theirs: TritonProcess

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | object = b"",
        headers: Mapping[str, str] | None = None,
    ) -> tuple[Answer, Answer]:
        """Send one HTTP request to both; return both answers, ours first. A `body` that is not bytes goes as JSON."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return ask(self.ours.http, method, path, content, headers), ask(
            self.theirs.http, method, path, content, headers
        )

    def call(self, stub: Callable[[str], Any], method: str, request: Any) -> tuple[Any, Any]:
        """Make one unary gRPC call on both, ours first.

        Args:
            stub: Makes a stub of `host:port`.

        Returns:
            For each the response, or the name of its status code.
        """
        return _call(stub(self.ours.grpc), method, request), _call(stub(self.theirs.grpc), method, request)


def once_counted(read: Callable[[], tuple[_T, _T]]) -> tuple[_T, _T]:
    """Return what both servers have counted, once Triton has: it counts a request after its answer has left.

    Args:
        read: Asks both, ours first.

    Returns:
        What Charonia said at the first reading, and what Triton said at the last: as soon as it was the same, or after
        `COUNTED_WITHIN_S`.
    """
    deadline = time.monotonic() + COUNTED_WITHIN_S
    ours, theirs = read()
    while theirs != ours and time.monotonic() < deadline:
        time.sleep(0.05)
        _, theirs = read()
    return ours, theirs


@dataclass(frozen=True, slots=True)
class Leniency:
    """What is not compared.

    Attributes:
        keys: Keys whose values may differ, wherever they are; whether they are there is compared.
        absent: Keys that one side may lack.
    """

    keys: frozenset[str] = frozenset({"error"})
    absent: frozenset[str] = field(default_factory=frozenset)


def comparable(document: object, leniency: Leniency = Leniency()) -> object:
    """Return the document without what is not compared."""
    if isinstance(document, Mapping):
        return {
            key: "..." if key in leniency.keys else comparable(value, leniency)
            for key, value in document.items()
            if key not in leniency.absent
        }
    if isinstance(document, Sequence) and not isinstance(document, str | bytes):
        return [comparable(value, leniency) for value in document]
    return document


def ask(endpoint: str, method: str, path: str, body: bytes, headers: Mapping[str, str] | None) -> Answer:
    request = urllib.request.Request(
        f"http://{endpoint}{path}", data=body if method == "POST" else None, headers=dict(headers or {}), method=method
    )
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS_MAX) as reply:
            return Answer(reply.status, {k.lower(): v for k, v in reply.headers.items()}, reply.read())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, {k.lower(): v for k, v in error.headers.items()}, error.read())


def _call(stub: Any, method: str, request: Any) -> Any:
    try:
        return getattr(stub, method)(request, timeout=ANSWER_SECONDS_MAX)
    except Exception as error:
        code = getattr(error, "code", None)
        if code is None:
            raise
        return code().name


def _is_open(endpoint: str) -> bool:
    host, port = endpoint.split(":")
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((host, int(port))) == 0
