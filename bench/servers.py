"""The compared servers as processes: start, CPU time, memory, stop."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from bench.models import MODEL, MODELS
from charonia import compiled

HOST = "127.0.0.1"
START_TIMEOUT_S = 60.0
PEERS = Path(os.environ.get("CHARONIA_PEERS", Path.home() / ".cache" / "charonia-peers"))

SERVERS = ("charonia", "pure", "triton", "fixed", "bare")

FLOORS = {"fixed": "bench.fixed_answers", "bare": "bench.bare_onnx"}
"""Servers that do less than a server must; the second one over HTTP only."""


def command_of(server: str, model: str, repository: Path, ports: Sequence[int]) -> list[str]:
    """Return the command that starts a server.

    Args:
        server: One of `SERVERS`: "charonia@PYTHON" has another interpreter, "pure" is Charonia's pure form.
        model: Name of the model that the repository holds.
        repository: Where the model is.
        ports: For HTTP, gRPC and metrics.
    """
    name, _, python = server.partition("@")
    if name in FLOORS:
        command = [sys.executable, "-m", FLOORS[name], f"--model={model}", f"--http-port={ports[0]}"]
        return command + [f"--grpc-port={ports[1]}"] * (name == "fixed")
    command = (
        [str(PEERS / "bin" / "tritonserver")]
        if name == "triton"
        else [python or sys.executable, "-m", "charonia", "serve"]
    )
    for kind, port in zip(("http", "grpc", "metrics"), ports, strict=True):
        command += [f"--{kind}-port={port}", f"--{kind}-address={HOST}"]
    return [*command, f"--model-repository={repository}"]


class Server:
    """One server with one model, on free ports.

    Args:
        variant: `server:model`, for example "charonia:identity" or "charonia@/usr/bin/python3:identity".
        flags: More flags for the server.
    """

    def __init__(self, variant: str, flags: Sequence[str] = ()) -> None:
        self.variant = variant
        self.server, self.model = variant.split(":")
        if self.server.partition("@")[0] not in SERVERS or self.model not in MODELS:
            raise SystemExit(f"unknown variant '{variant}': servers {SERVERS}, models {sorted(MODELS)}")
        self._flags = list(flags)
        self._folder = tempfile.TemporaryDirectory(prefix="charonia-bench-")

    def __enter__(self) -> Self:
        folder = Path(self._folder.name)
        MODELS[self.model](folder / "models")
        ports = free_ports(3)
        self.http, self.grpc = f"{HOST}:{ports[0]}", f"{HOST}:{ports[1]}"
        command = command_of(self.server, self.model, folder / "models", ports)
        self.log = folder / "log.txt"
        begin = time.monotonic()
        with self.log.open("wb") as log:
            environment = {**os.environ, compiled.PURE: "1"} if self.server == "pure" else None
            self._process = subprocess.Popen(
                [*command, *self._flags], stdout=log, stderr=subprocess.STDOUT, env=environment
            )
        self._wait_until_ready()
        self.start_seconds = time.monotonic() - begin
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    @property
    def pid(self) -> int:
        """The process, of which others may be children."""
        return self._process.pid

    def cpu_seconds(self) -> float:
        """CPU time spent so far, processes of Python models included."""
        total = 0.0
        for process in self.processes():
            times = process.cpu_times()
            total += times.user + times.system
        return total

    def page_faults(self) -> int:
        """Pages that the system has had to provide so far, processes of Python models included."""
        stats = [Path(f"/proc/{process.pid}/stat").read_text() for process in self.processes()]
        return sum(int(stat.rpartition(")")[2].split()[7]) for stat in stats)

    def memory_bytes(self) -> int:
        """Resident memory now, processes of Python models included."""
        return sum(process.memory_info().rss for process in self.processes())

    def inference_count(self) -> int:
        """Inferences that the model has run so far, from the server's own statistics."""
        try:
            with urllib.request.urlopen(f"http://{self.http}/v2/models/{MODEL}/stats", timeout=10) as answer:
                statistics: dict[str, Any] = json.load(answer)
        except urllib.error.URLError as error:
            status = self._process.poll()
            raise SystemExit(f"{self.variant}: {error}, exit status {status}\n{self._log_end()}") from None
        return int(statistics["model_stats"][0]["inference_count"])

    def version(self) -> str:
        """Name and version as the server says."""
        with urllib.request.urlopen(f"http://{self.http}/v2", timeout=10) as answer:
            metadata = json.load(answer)
        return f"{metadata['name']} {metadata['version']}"

    def processes(self) -> list[psutil.Process]:
        """Return the server's processes."""
        root = psutil.Process(self._process.pid)
        return [root, *root.children(recursive=True)]

    def _log_end(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-60:])

    def _wait_until_ready(self) -> None:
        give_up = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                urllib.request.urlopen(f"http://{self.http}/v2/models/{MODEL}/ready", timeout=5).close()
            except (urllib.error.URLError, OSError) as error:
                if self._process.poll() is not None or time.monotonic() > give_up:
                    self._process.kill()
                    raise SystemExit(f"{self.variant} is not ready: {error}\n{self._log_end()}") from None
                time.sleep(0.02)
            else:
                return


def free_ports(count: int) -> list[int]:
    """Return different free ports."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((HOST, 0))
        return [int(probe.getsockname()[1]) for probe in probes]
