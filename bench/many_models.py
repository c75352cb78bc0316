"""A repository of thousands of models: start, memory, index, polls, and a load and an inference of many of them.

python -m bench.many_models --models 10000 --loads 1000
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import psutil

from bench.compare import RESULTS
from bench.machine import machine
from bench.servers import free_ports

CONFIG = """backend: "identity"
max_batch_size: 8
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: 16 } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: 16 } ]
"""
BODY = {"inputs": [{"name": "INPUT0", "shape": [1, 16], "datatype": "FP32", "data": [1.0] * 16}]}
IDLE_S = 20.0
POLL_S = 5.0


class Measured:
    """A server of a repository, with the time and the CPU time of what is asked of it."""

    def __init__(self, repository: Path, *options: str) -> None:
        self.rows: dict[str, float] = {}
        (port,) = free_ports(1)
        command = [sys.executable, "-m", "charonia", "serve", str(repository), f"--http-port={port}", *options]
        begun = time.monotonic()
        self.process = subprocess.Popen(
            [*command, "--http-address=127.0.0.1", "--allow-grpc=false", "--allow-metrics=false"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._base = f"http://127.0.0.1:{port}/v2"
        while not self._is_ready():
            time.sleep(0.02)
        self.rows["ready s"] = time.monotonic() - begun
        self.rows["memory MB"] = self.memory()

    def __enter__(self) -> "Measured":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()

    def memory(self) -> float:
        return psutil.Process(self.process.pid).memory_info().rss / 1e6

    def cpu_s(self) -> float:
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system

    def take(self, name: str, action: Callable[[], object]) -> None:
        """Note how long the action takes, and the server's CPU time in it."""
        begun, cpu_s = time.monotonic(), self.cpu_s()
        action()
        self.rows[f"{name} s"] = time.monotonic() - begun
        self.rows[f"{name} CPU s"] = self.cpu_s() - cpu_s

    def call(self, path: str, body: object = None) -> None:
        """Request a path by POST, or by GET where there is no body."""
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(self._base + path, data), timeout=600) as answer:
            answer.read()

    def load_and_infer(self, count: int) -> None:
        for number in range(count):
            self.call(f"/repository/models/m{number:05d}/load", {})
            self.call(f"/models/m{number:05d}/infer", BODY)

    def _is_ready(self) -> bool:
        if self.process.poll() is not None:
            raise SystemExit("the server has ended")
        try:
            self.call("/health/ready")
        except OSError:
            return False
        return True


def main() -> None:
    """Measure an empty repository and a full one, in explicit mode and with polls."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=10_000)
    parser.add_argument("--loads", type=int, default=1_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(given.models):
            model = Path(folder, "full", f"m{number:05d}")
            (model / "1").mkdir(parents=True)
            (model / "config.pbtxt").write_text(CONFIG, encoding="utf-8")
        empty = Path(folder, "empty")
        empty.mkdir()
        with Measured(empty, "--model-control-mode=explicit") as server:
            rows = {"empty: memory MB": server.rows["memory MB"]}
        with Measured(Path(folder, "full"), "--model-control-mode=explicit") as server:
            server.take("index", lambda: server.call("/repository/index", {}))
            server.take("idle, nothing loaded,", lambda: time.sleep(IDLE_S))
            server.rows["memory, idle MB"] = server.memory()
            server.take(f"load and infer {given.loads}", lambda: server.load_and_infer(given.loads))
            server.take(f"idle, {given.loads} loaded,", lambda: time.sleep(IDLE_S))
            server.rows["memory, loaded MB"] = server.memory()
            rows |= {f"explicit: {name}": value for name, value in server.rows.items()}
        poll = ("--model-control-mode=auto", f"--repository-poll-secs={POLL_S:g}")
        with Measured(Path(folder, "full"), *poll) as server:
            server.take(f"idle, {IDLE_S / POLL_S:g} polls,", lambda: time.sleep(IDLE_S))
            rows |= {f"auto: {name}": value for name, value in server.rows.items()}
    for name, value in rows.items():
        print(f"{name:<50} {value:10.2f}")
    record = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine(), **vars(given), **rows}
    (RESULTS / "many_models.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
