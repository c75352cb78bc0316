"""`charonia serve` as a process, started and stopped as a script would do it."""

import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import charonia

HOST = "127.0.0.1"
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0

LOG = "server.log"
"""File of the repository with the server's log; files beside the models' folders are ignored."""


class Ports(NamedTuple):
    """Where the server listens."""

    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002


def free_ports() -> Ports:
    """Return three ports that are free now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server((HOST, 0))) for _ in Ports()]
        return Ports(*(each.getsockname()[1] for each in sockets))


def demand_free(ports: Ports) -> None:
    """Check that the ports are free, because the demo must not talk to another server."""
    taken = [str(port) for port in ports if not is_free(port)]
    if taken:
        hint = "`charonia demo --once` takes free ports"
        raise unavailable(f"in use by another program: port {', '.join(taken)}", hint)


def is_free(port: int) -> bool:
    try:
        socket.create_server((HOST, port)).close()
    except OSError:
        return False
    return True


@contextmanager
def running_server(repository: Path, ports: Ports) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server and wait until it is ready; stop it gracefully on exit."""
    command = [sys.executable, "-P", "-m", "charonia", "serve", f"--model-repository={repository}"]
    for name, port in ports._asdict().items():
        command += [f"--{name}-address={HOST}", f"--{name}-port={port}"]
    # In its own session: Ctrl-C reaches this program only, which then stops the server.
    with (repository / LOG).open("wb") as log:
        process = subprocess.Popen(command, start_new_session=True, stdout=log, stderr=log)
    try:
        wait_until_ready(process, ports, repository / LOG)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)  # has no effect on a process that has exited
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], ports: Ports, log: Path) -> None:
    give_up = time.monotonic() + START_TIMEOUT_S
    while not is_ready(ports):
        if process.poll() is not None:
            hint = f"its log is {log}"
            raise unavailable(f"the server ended with status {process.returncode} before it was ready", hint)
        if time.monotonic() > give_up:
            raise unavailable(f"the server was not ready after {START_TIMEOUT_S:.0f} s")
        time.sleep(0.05)


def is_ready(ports: Ports) -> bool:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{ports.http}/v2/health/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def unavailable(message: str, hint: str = "") -> charonia.ServingError:
    return charonia.ServingError(charonia.Code.UNAVAILABLE, message, hint=hint)
