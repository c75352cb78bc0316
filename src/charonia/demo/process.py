"""A server of our own as a process, as a user would start it."""

import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from charonia.core.errors import unavailable
from charonia.die_with_parent import tethered

_HOST = "127.0.0.1"
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Ports:
    """Where the server listens."""

    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002

    @property
    def http_address(self) -> str:
        """The HTTP endpoint as `host:port`."""
        return f"{_HOST}:{self.http}"

    @property
    def grpc_address(self) -> str:
        """The gRPC endpoint as `host:port`."""
        return f"{_HOST}:{self.grpc}"

    @property
    def metrics_address(self) -> str:
        """The metrics endpoint as `host:port`."""
        return f"{_HOST}:{self.metrics}"


def free_ports() -> Ports:
    """Return three ports that nobody listens on at this moment."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
        for each in sockets:
            each.bind((_HOST, 0))
        return Ports(*(each.getsockname()[1] for each in sockets))


def demand_free(ports: Ports) -> None:
    """Check that nobody listens on the ports: a server that is there already would be taken for ours.

    Raises:
        ServingError: UNAVAILABLE, with the ports that are in use.
    """
    taken = [str(port) for port in (ports.http, ports.grpc, ports.metrics) if not _is_free(port)]
    if taken:
        raise unavailable(
            f"in use by another program: port {', '.join(taken)}", hint="`charonia demo --once` takes free ports"
        )


def _is_free(port: int) -> bool:
    with socket.socket() as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: closed connections do not count
        try:
            attempt.bind((_HOST, port))
        except OSError:
            return False
    return True


@contextmanager
def running_server(repository: Path, ports: Ports) -> Iterator[subprocess.Popen[bytes]]:
    """Start `charonia serve` and wait until it is ready; at the end stop it gracefully.

    Raises:
        ServingError: UNAVAILABLE when it ends, or does not get ready, instead.
    """
    command = [sys.executable, "-m", "charonia", "serve", f"--model-repository={repository}"]
    for name, port in (("http", ports.http), ("grpc", ports.grpc), ("metrics", ports.metrics)):
        command += [f"--{name}-address={_HOST}", f"--{name}-port={port}"]
    # A session of its own: Ctrl-C reaches us, and the server is told once, by us.
    process = subprocess.Popen(tethered(command, signal.SIGTERM), start_new_session=True)
    try:
        _wait_until_ready(process, ports)
        yield process
    finally:
        _stop(process)


def _wait_until_ready(process: subprocess.Popen[bytes], ports: Ports) -> None:
    give_up = time.monotonic() + _START_TIMEOUT_S
    while not _is_ready(ports):
        if process.poll() is not None:
            raise unavailable(f"the server ended with status {process.returncode} before it was ready")
        if time.monotonic() > give_up:
            raise unavailable(f"the server was not ready after {_START_TIMEOUT_S:.0f} s")
        time.sleep(0.05)


def _is_ready(ports: Ports) -> bool:
    try:
        with urllib.request.urlopen(f"http://{ports.http_address}/v2/health/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
