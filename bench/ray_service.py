"""One ONNX network in Ray Serve, in two ways, and around its proxy: `python -m bench.ray_service`.

- plain: a deployment that calls ONNX Runtime, with `@serve.batch`; a row of floats and the result as raw bytes
- charonia: `charonia.ray.app` behind Ray's HTTP proxy, KServe v2 with binary tensors
- direct: the same replica, at its own port

All three run in one cluster of this machine, one replica each; in turn, each gets a closed loop of clients. Environment
variables of Ray hold for the cluster, such as RAY_SERVE_THROUGHPUT_OPTIMIZED=1; `--name` tells apart their results.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import ray
from ray import serve

import charonia.ray
from bench.compare import RESULTS
from bench.image_service import Way, load, wait_until_ready
from bench.machine import machine
from bench.models import MODEL, mlp_tuned
from bench.servers import HOST, free_ports

BATCH_MAX = 64
ONGOING_MAX = 256


class Answered(NamedTuple):
    """One run.

    Attributes:
        rate_per_s: Requests a second.
        p50_ms: Median latency, in ms.
        p99_ms: 99th percentile of the latency, in ms.
        cpu_ms: CPU time of all processes of the cluster for each request, in ms.
    """

    rate_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_ms: float


@serve.deployment(max_ongoing_requests=ONGOING_MAX, ray_actor_options={"num_cpus": 0.5})
class Plain:
    """What people write."""

    def __init__(self, path: str) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    @serve.batch(max_batch_size=BATCH_MAX, batch_wait_timeout_s=0.0)
    async def infer(self, rows: list[Any]) -> list[Any]:
        """Run a batch."""
        (outputs,) = self._session.run(None, {"INPUT0": np.stack(rows)})
        return list(outputs)

    async def __call__(self, request: Any) -> Any:
        """Answer one request."""
        from starlette.responses import Response

        row = np.frombuffer(await request.body(), np.float32)
        return Response((await self.infer(row)).tobytes(), media_type="application/octet-stream")


@contextmanager
def cluster() -> Iterator[int]:
    """Run a cluster; yield the port of its proxy."""
    os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=2**27, _temp_dir=folder)
        try:
            serve.start(http_options={"host": HOST, "port": port})
            yield port
        finally:
            serve.shutdown()  # type: ignore[no-untyped-call]
            ray.shutdown()


def ways(port: int, direct: int) -> list[tuple[Way, int]]:
    """Return the ways, with the port of each."""
    row = np.zeros((1, 128), np.float32)
    parameters = {"binary_data_size": row.nbytes}
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": list(row.shape), "parameters": parameters}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    size = f"Inference-Header-Content-Length: {len(head)}"
    path, body = f"/v2/models/{MODEL}/infer", head + row.tobytes()
    return [
        (Way("plain", "/plain", "Content-Type: application/octet-stream", row.tobytes()), port),
        (Way("charonia", f"/charonia{path}", size, body), port),
        (Way("direct", path, size, body), direct),
    ]


def cpu_seconds() -> float:
    """Return the CPU time of all processes of the cluster: children of this one."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        times = process.cpu_times()
        total += times.user + times.system
    return total


def measure(way: Way, port: int, clients: int, seconds: float) -> Answered:
    """Load one of them."""
    before = cpu_seconds()
    latencies = asyncio.run(load(way, port, clients, seconds))
    p50, p99 = (latencies[len(latencies) * percent // 100] * 1e3 for percent in (50, 99))
    return Answered(len(latencies) / seconds, p50, p99, (cpu_seconds() - before) * 1e3 / len(latencies))


def compare(all_ways: list[tuple[Way, int]], clients: int, rounds: int, seconds: float) -> dict[str, object]:
    """Measure in turns; print the medians, and return every run."""
    runs: dict[str, list[Answered]] = {way.name: [] for way, _ in all_ways}
    for number in range(rounds):
        for way, port in all_ways[:: 1 if number % 2 else -1]:
            runs[way.name].append(measure(way, port, clients, seconds))
    for name, each in runs.items():
        rate, p50, p99, cpu = (statistics.median(run[index] for run in each) for index in range(4))
        ratio = statistics.median(a.rate_per_s / b.rate_per_s for a, b in zip(each, runs["plain"], strict=True))
        line = f"{clients:3} clients {name:9} {rate:8.1f} requests/s, p50 {p50:7.2f} ms, p99 {p99:7.2f} ms"
        print(f"{line}, CPU {cpu:6.2f} ms, {ratio:.2f} x plain", flush=True)
    return {name: [run._asdict() for run in each] for name, each in runs.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--name", default="", help="part of the name of the results")
    given = parser.parse_args()
    settings = {name: value for name, value in os.environ.items() if name.startswith("RAY_SERVE_")}
    record: dict[str, object] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine() | {"ray": version("ray")},
        "settings": settings,
    }
    with tempfile.TemporaryDirectory(prefix="charonia-bench-") as name, cluster() as port:
        models = Path(name)
        mlp_tuned(models)
        plain = Plain.bind(str(models / MODEL / "1" / "model.onnx"))  # type: ignore[attr-defined]
        serve.run(plain, name="plain", route_prefix="/plain")
        ours = charonia.ray.app(repository=str(models), num_cpus=0.5, max_ongoing_requests=ONGOING_MAX)
        serve.run(ours, name="charonia", route_prefix="/charonia")
        (replica,) = charonia.ray.addresses("charonia")
        all_ways = ways(port, int(replica["http"].rpartition(":")[2]))
        for way, at in all_ways:
            wait_until_ready(way, at)
            measure(way, at, max(given.clients), 2.0)
        for clients in given.clients:
            record[f"clients_{clients}"] = compare(all_ways, clients, given.rounds, given.seconds)
    file = RESULTS / f"ray_service{'-' * bool(given.name)}{given.name}.json"
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
