"""A Ray cluster of this machine with Serve, and load for it."""

import http.client
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import ray
from ray import serve
from tests.support.ports import free_port

OBJECT_STORE_BYTES = 80 * 2**20
CPUS = 4

ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # 15 by default: beside busy processes, Serve would take minutes to start
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # 5 s by default, which is short for a busy machine
}


@dataclass(frozen=True)
class Cluster:
    """Where Ray's proxies and its dashboard listen."""

    http: str
    grpc: str
    dashboard: str


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Run a cluster; `folder` has a short name, because sockets lie in it."""
    ports = [free_port(), free_port(), free_port()]
    with patch.dict(os.environ, ENVIRONMENT):
        ray.init(
            num_cpus=CPUS,
            include_dashboard=True,
            dashboard_host="127.0.0.1",
            dashboard_port=ports[2],
            log_to_driver=False,
            configure_logging=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=str(folder),
        )
    try:
        serve.start(
            http_options={"host": "127.0.0.1", "port": ports[0]},
            grpc_options={"port": ports[1], "grpc_servicer_functions": ["charonia.ray.add_grpc_services"]},
        )
        yield Cluster(*(f"127.0.0.1:{port}" for port in ports))
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, f"{what}: not within {timeout_s} s"
        time.sleep(0.1)


@dataclass
class Load:
    """What clients of a proxy were answered: statuses, and the bodies of those that are no success."""

    statuses: Counter[int] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


@contextmanager
def load(address: str, model: str, clients: int) -> Iterator[Load]:
    """Send inferences from so many clients, each as soon as its last one is answered."""
    body = json.dumps({"inputs": [{"name": "INPUT0", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]})
    found, stopped = Load(), threading.Event()

    def run() -> None:
        connection = http.client.HTTPConnection(address, timeout=200)
        while not stopped.is_set():
            connection.request("POST", f"/v2/models/{model}/infer", body)
            response = connection.getresponse()
            text = response.read().decode()
            found.statuses[response.status] += 1
            if response.status != 200 or json.loads(text)["outputs"][0]["data"] != [1, 2, 3, 4]:
                found.failures.append(f"{response.status}: {text[:300]}")
        connection.close()

    threads = [threading.Thread(target=run) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield found
    finally:
        stopped.set()
        for thread in threads:
            thread.join()
