"""The measured server: a process that this tool starts on free ports of this machine, or a running remote server."""

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from charonia.client.sync_client import Client
from charonia.core.errors import ServingError, invalid, unavailable
from charonia.die_with_parent import with_parent_death_signal
from charonia.python_command import python_module
from charonia.tools.perf.options import WireProtocol
from charonia.tools.tune.options import LaunchMode, LaunchOptions

HOST = "127.0.0.1"
START_SECONDS_MAX = 120.0
STOP_SECONDS_MAX = 30.0
END_SECONDS_MAX = 1.0
RETRY_SECONDS = 0.05
REMOTE_RETRY_SECONDS_MAX = 1.0
LOG_LINES = 20
"""Last lines of a server's log that an error shows."""

THEIR_SERVER = "tritonserver"
"""Server that Model Analyzer starts where none is named."""

RESERVED_FLAGS = frozenset(f"{kind}-{name}" for kind in ("http", "grpc", "metrics") for name in ("port", "address")) | {
    "model-repository",
    "model-control-mode",
}
"""Flags of the server that are set here."""


class LocalServer:
    """A server that this tool starts, in mode explicit, at first without models. Use it as a context manager."""

    is_ours = True

    def __init__(self, options: LaunchOptions) -> None:
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    def __enter__(self) -> Self:
        """Start it and wait until it answers.

        Raises:
            ServingError: INVALID_ARG without a repository or a program, UNAVAILABLE when it ends or does not answer.
        """
        repository = self._options.repository
        if repository is None or not repository.is_dir():
            raise invalid(f"--model-repository: expected a folder, got '{repository}'")
        self._command = command_of(self._options)
        self._open_log()
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.client.close()
        self._end()

    def exit_reason(self) -> str:
        """Return how it ended, as a sentence; "" while it runs."""
        status = self._process.poll() if self._process is not None else None
        if status is None:
            return ""
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"the server {how}"

    def url(self, protocol: WireProtocol) -> str:
        return f"grpc://{self._grpc}" if protocol is WireProtocol.GRPC else self.control_url

    def restart(self) -> None:
        """Restart it after it ended."""
        self.client.close()
        self._stop()
        self._start()

    def log_tail(self) -> str:
        """Return the last lines of its log."""
        if self._log is None:
            return ""
        content = Path(self._log.name).read_bytes().decode(errors="replace")
        return "\n".join(content.splitlines()[-LOG_LINES:])

    def _open_log(self) -> None:
        path = self._options.server_log
        try:
            # Open as long as the server runs; closed in `_end`.
            self._log = (
                path.open("ab") if path is not None else tempfile.NamedTemporaryFile(prefix="charonia-tune-")  # noqa: SIM115
            )
        except OSError as error:
            raise invalid(f"--triton-output-path: '{path}' cannot be written: {error.strerror}") from error

    def _start(self) -> None:
        ports = _free_ports()
        self._http, self._grpc, metrics = (f"{HOST}:{port}" for port in ports)
        self.control_url = f"http://{self._http}"
        self.metrics_url = f"http://{metrics}/metrics"
        flags = [f"--model-repository={self._options.repository}", "--model-control-mode=explicit"]
        for name, port in zip(("http", "grpc", "metrics"), ports, strict=True):
            flags += [f"--{name}-address={HOST}", f"--{name}-port={port}"]
        flags += [f"--{name}={value}" if value else f"--{name}" for name, value in self._options.server_flags]
        environment = os.environ | dict(self._options.server_environment)
        try:
            # In a separate session, so that Ctrl-C reaches this process only, which then stops the server.
            self._process = subprocess.Popen(
                with_parent_death_signal([*self._command, *flags]),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise invalid(f"the server '{self._command[0]}' cannot be started: {error.strerror}") from error
        self.client = Client(self.control_url)
        try:
            self._wait_until_ready()
        except BaseException:
            self.client.close()
            raise

    def _wait_until_ready(self) -> None:
        give_up = time.monotonic() + START_SECONDS_MAX
        while True:
            with contextlib.suppress(ServingError):
                if self.client.server_ready():
                    return
            if self.exit_reason() or time.monotonic() > give_up:
                reason = self.exit_reason() or f"the server did not answer within {START_SECONDS_MAX:.0f} s"
                raise unavailable(f"{reason} before it was ready; its log ends with:\n{self.log_tail()}")
            time.sleep(RETRY_SECONDS)

    def _stop(self) -> None:
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _end(self) -> None:
        self._stop()
        if self._log is not None:
            self._log.close()


class RemoteServer:
    """A server that runs already. Use it as a context manager.

    Models are controlled over the protocol of the requests, or over the other protocol if that does not respond: an
    unused port need not be reachable.

    Args:
        note: Receives the message that the tool waits for the server.
    """

    is_ours = False

    def __init__(
        self, options: LaunchOptions, protocol: WireProtocol, note: Callable[[str], None], stop: threading.Event
    ) -> None:
        self._options = options
        self._protocol = protocol
        self._note = note
        self._stop = stop
        self.metrics_url = options.metrics_url

    def __enter__(self) -> Self:
        """Wait until it answers: it may have been started at the same moment, and loads its models.

        Raises:
            ServingError: UNAVAILABLE when it does not.
        """
        protocols = sorted(WireProtocol, key=lambda protocol: protocol is not self._protocol)
        problems: dict[str, str] = {}
        pause = RETRY_SECONDS
        for attempt in range(self._options.retries):
            if self._stop.is_set():
                break
            for url in map(self.url, protocols):
                client = Client(url)
                try:
                    if client.server_ready():
                        self.control_url, self.client = url, client
                        return self
                    client.server_metadata()  # without an answer, the error says why
                    problems[url] = f"{url} is not ready"
                except ServingError as error:
                    problems[url] = error.message
                except BaseException:
                    client.close()
                    raise
                client.close()
            if attempt == 0:
                self._note(f"waiting for a server: {'; '.join(problems.values())}")
            time.sleep(pause)
            pause = min(2 * pause, REMOTE_RETRY_SECONDS_MAX)
        raise unavailable(
            "no server answers: " + "; ".join(problems.values()),
            hint="--triton-http-endpoint and --triton-grpc-endpoint have its address",
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the connections; the server continues."""
        self.client.close()

    def exit_reason(self) -> str:
        """Return that it no longer answers; how a remote server ended is unknown."""
        with contextlib.suppress(ServingError):
            if self.client.server_live():
                return ""
        return f"the server at {self.control_url} no longer answers"

    def url(self, protocol: WireProtocol) -> str:
        options = self._options
        endpoint = options.grpc_endpoint if protocol is WireProtocol.GRPC else options.http_endpoint
        return endpoint if "://" in endpoint else f"{protocol.value}://{endpoint}"

    def restart(self) -> None:
        """Refuse: a remote server is not started from here."""
        raise unavailable(self.exit_reason() or f"the server at {self.control_url} was lost")


MeasuredServer = LocalServer | RemoteServer
"""A server that answers. `is_ours`: this tool started it, so that it has no other clients."""


def exit_reason_of(server: MeasuredServer) -> str:
    """Return how a server ended that has just stopped answering; a local process may take a moment to exit."""
    give_up = time.monotonic() + (END_SECONDS_MAX if server.is_ours else 0.0)
    while not (fate := server.exit_reason()) and time.monotonic() < give_up:
        time.sleep(RETRY_SECONDS)
    return fate


def server_of(
    options: LaunchOptions, protocol: WireProtocol, note: Callable[[str], None], stop: threading.Event
) -> MeasuredServer:
    """Return the server of the options, not yet started, for requests over a protocol."""
    return RemoteServer(options, protocol, note, stop) if options.mode is LaunchMode.REMOTE else LocalServer(options)


def command_of(options: LaunchOptions) -> list[str]:
    """Return the program to start, without flags.

    Raises:
        ServingError: INVALID_ARG where the program does not exist, or a flag is given that is set here.
    """
    for name, _ in options.server_flags:
        if name in RESERVED_FLAGS:
            raise invalid(f"triton_server_flags: '{name}' is set by charonia tune itself")
    words = shlex.split(options.server_path)
    if not words or not can_start(options.server_path):
        return python_module("charonia", "serve")
    if shutil.which(words[0]) is None:
        raise invalid(
            f"--triton-server-path: expected a program, got '{words[0]}', which is none",
            hint="without it, charonia serve is started",
        )
    return words


def can_start(server_path: str) -> bool:
    """Return whether the named server can be started: Model Analyzer's default may not be installed."""
    return server_path != THEIR_SERVER or shutil.which(THEIR_SERVER) is not None


def _free_ports() -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
        for each in sockets:
            each.bind((HOST, 0))
        return [int(each.getsockname()[1]) for each in sockets]
