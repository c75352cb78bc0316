"""A served model whose number of instances follows the load: it grows, shrinks, and loses no request meanwhile."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from tests.support.models import answering, identity_pbtxt, write_model
from tests.support.process import SHAPES, ServeProcess, Shape, eventually
from tests.support.running_load import Load

from charonia.core.dtypes import DataType

SLOW = answering("time.sleep(0.1) or np.array([os.getpid()], np.int32)", imports="import os, time")
REQUEST = {"inputs": [{"name": "INPUT0", "datatype": "INT32", "shape": [1], "data": [1]}]}
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
    config = identity_pbtxt("python", DataType.INT32, (1,), max_batch_size=0, more=bounds(1, 3))
    write_model(tmp_path, "slow", SLOW, config=config)
    return tmp_path


def serve(repository: Path, *arguments: str) -> ServeProcess:
    return ServeProcess(repository, "--model-control-mode=explicit", "--load-model=slow", CORES, *arguments)


def ask(server: ServeProcess) -> int:
    """Send a request, and return the process that answered it."""
    return int(server.ask("/v2/models/slow/infer", REQUEST)["outputs"][0]["data"][0])


def load_of(server: ServeProcess) -> Load:
    return Load({str(number): lambda: nullcontext(lambda _: ask(server)) for number in range(CLIENTS)}, 0)


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
    with load_of(server) as load:
        assert eventually(lambda: count(server) == 3), server.log
        yield load


@pytest.mark.parametrize("shape", SHAPES)
def test_a_busy_model_grows_and_an_idle_one_shrinks_without_a_lost_request(repository: Path, shape: Shape) -> None:
    with serve(repository, *shape) as server:
        assert instances(server)["charonia_instances_min"] == 1
        assert instances(server)["charonia_instances_max"] == 3

        with grown(server) as load:
            assert eventually(lambda: len(load.results) == 3)
            said = str(explained(server)["scaling"])
        assert re.fullmatch(r"3 of 1 to 3 instances; a third was added .* because requests waited .*", said)

        assert eventually(lambda: count(server) == 1)
        assert ask(server) in load.results
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
