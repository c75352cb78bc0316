"""A served model whose number of instances follows the load: it grows, shrinks, and loses no request meanwhile."""

import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest
from tests.support.models import write_model
from tests.support.process import SHAPES, ServeProcess, Shape, eventually

SLOW = """\
import os
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.1)
        pid = np.array([os.getpid()], np.int32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", pid)]) for _ in requests]
"""
TENSORS = (
    'input { name: "INPUT0" data_type: TYPE_INT32 dims: 1 } output { name: "OUTPUT0" data_type: TYPE_INT32 dims: 1 }'
)
BODY = json.dumps({"inputs": [{"name": "INPUT0", "datatype": "INT32", "shape": [1], "data": [1]}]}).encode()
CLIENTS = 6
# More than the machine may have, so that other tests do not take the cores that an instance could use.
CORES = "--cpu-cores=16"


def bounds(least: int, most: int) -> str:
    return "".join(
        f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}\n'
        for name, value in (("INSTANCES_MIN", least), ("INSTANCES_MAX", most))
    )


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write_model(tmp_path, "slow", SLOW, config=f'backend: "python" {TENSORS}\n{bounds(1, 3)}')
    return tmp_path


def serve(repository: Path, *arguments: str) -> ServeProcess:
    return ServeProcess(repository, "--model-control-mode=explicit", "--load-model=slow", CORES, *arguments)


def ask(server: ServeProcess) -> int:
    """Send a request, and return the process that answered it."""
    with urllib.request.urlopen(f"http://{server.http}/v2/models/slow/infer", BODY, timeout=60) as answer:
        return int(json.load(answer)["outputs"][0]["data"][0])


class Load:
    """Clients that send one request after the other."""

    def __init__(self, server: ServeProcess, clients: int = CLIENTS) -> None:
        self.answers: list[int] = []
        self.errors: list[str] = []
        self._server = server
        self._over = threading.Event()
        self._threads = ThreadPoolExecutor(clients)
        self._running: list[Future[None]] = [self._threads.submit(self._send) for _ in range(clients)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self._threads.shutdown()
        if error is None:
            for each in self._running:
                each.result()

    def _send(self) -> None:
        while not self._over.is_set():
            try:
                self.answers.append(ask(self._server))
            except urllib.error.HTTPError as error:
                self.errors.append(error.read().decode())


def instances(server: ServeProcess) -> dict[str, int]:
    series = r'(charonia_instance\w*)\{model="slow",version="1"(?:,reason="(\w+)")?\} (\d+)'
    found = re.findall(series, server.metrics_page())
    return {reason or name: int(value) for name, reason, value in found}


def count(server: ServeProcess) -> int:
    return instances(server)["charonia_instances"]


def explained(server: ServeProcess) -> dict[str, object]:
    document: dict[str, object] = server.ask("/v2/models/slow/explain")["instances"]
    return document


@contextmanager
def grown(server: ServeProcess) -> Iterator[Load]:
    """Keep the model busy; it has all of its instances."""
    with Load(server) as load:
        assert eventually(lambda: count(server) == 3), server.log
        yield load


@pytest.mark.parametrize("shape", SHAPES)
def test_a_busy_model_grows_and_an_idle_one_shrinks_without_a_lost_request(repository: Path, shape: Shape) -> None:
    with serve(repository, *shape) as server:
        assert instances(server)["charonia_instances_min"] == 1
        assert instances(server)["charonia_instances_max"] == 3

        with grown(server) as load:
            assert eventually(lambda: len(set(load.answers)) == 3)
            said = str(explained(server)["scaling"])
        assert re.fullmatch(r"3 of 1 to 3 instances; a third was added .* because requests waited .*", said)

        assert eventually(lambda: count(server) == 1)
        assert ask(server) in load.answers
        assert load.errors == []
        assert instances(server) == {
            "charonia_instances": 1,
            "charonia_instances_min": 1,
            "charonia_instances_max": 3,
            "requests_waited": 2,
            "idle": 2,
            "start_failed": 0,
        }
        assert "; one was closed" in str(explained(server)["scaling"])
        assert "3 of 1 to 3 instances" in server.log
