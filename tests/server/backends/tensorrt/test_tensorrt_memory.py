"""The memory of GPUs that plans use: one pool for all of them, on a stand-in for TensorRT and a GPU."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.backends import ask, version_of
from tests.support.pretended_tensorrt import PROGRAMS, Program, StreamingCuda, plan_bytes, pretended

from charonia.config.kinds import InstanceKind
from charonia.config.model import Cuda, ModelConfig, ModelInput, ModelOutput, Optimization
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.core.tensor import Array
from charonia.server.backends.api import BackendSettings, Placement
from charonia.server.backends.tensorrt.backend import PlanInstance, TensorRtBackend, TensorRtModel
from charonia.server.metrics.devices import MemoryAccount

FP32 = DataType.FP32
CONFIG = ModelConfig(
    name="m",
    max_batch_size=8,
    input=(ModelInput("x", FP32, dims=(4,)),),
    output=(ModelOutput("y", FP32, dims=(4,)),),
)
GRAPHS = replace(CONFIG, optimization=Optimization(cuda=Cuda(graphs=True)))
TENSORS = 2 * 256
"""What inputs and outputs take in a block."""


@pytest.fixture
def cuda(tmp_path: Path) -> Iterator[StreamingCuda]:
    folder = tmp_path / "gpu"
    folder.mkdir()
    with pretended(folder) as found:
        yield found


class Server:
    def __init__(self, tmp_path: Path, **settings: str) -> None:
        self.folder = tmp_path
        self.settings = BackendSettings({key.replace("_", "-"): value for key, value in settings.items()})
        self.backend = TensorRtBackend()
        self.models: dict[str, TensorRtModel] = {}

    def load(self, name: str, config: ModelConfig = CONFIG, instances: int = 1, **plan: Any) -> list[PlanInstance]:
        files = version_of(self.folder / name, model_plan=plan_bytes(**plan))

        async def make() -> list[PlanInstance]:
            model = await self.backend.load(files, config, self.settings)
            self.models[name] = model
            places = (Placement(f"m_{number}", InstanceKind.KIND_GPU) for number in range(instances))
            return [await model.create_instance(place) for place in places]

        return asyncio.run(make())

    def unload(self, name: str, *instances: PlanInstance) -> None:
        for instance in instances:
            instance.close()
        asyncio.run(self.models.pop(name).aclose())

    @property
    def account(self) -> MemoryAccount:
        return self.settings.gpu_pools[0]


def run(instance: PlanInstance, x: Array) -> Array:
    return ask(instance, x=x)["y"]


def works(instance: PlanInstance, rows: int) -> bool:
    x = np.arange(rows * 4, dtype="<f4").reshape(rows, 4)
    return np.array_equal(run(instance, x), 2 * x + 1)


def meanwhile(monkeypatch: pytest.MonkeyPatch, other: PlanInstance, errors: list[ServingError]) -> None:
    """While a plan of the program `outer` runs, another instance is to run, too."""

    def compute(inputs: Any) -> dict[str, Array]:
        try:
            assert works(other, 2)
        except ServingError as error:
            errors.append(error)
        return {"y": 2 * inputs["x"] + 1}

    monkeypatch.setitem(PROGRAMS, "outer", Program(compute, lambda shapes, _: {"y": shapes["x"]}))


def test_one_allocation_and_one_address_serve_a_thousand_batches(cuda: StreamingCuda, tmp_path: Path) -> None:
    server = Server(tmp_path)
    (instance,) = server.load("m", memory=[1 << 20])

    assert all(works(instance, 1 + number % 8) for number in range(1000))

    assert (cuda.allocations, len(cuda.given)) == (1, 1)
    assert (server.account.used_bytes, server.account.idle_bytes) == (0, cuda.device_bytes())
    assert (1 << 20) + TENSORS <= cuda.device_bytes() <= ((1 << 20) + TENSORS) * 9 // 8


def test_unloading_gives_the_memory_back(cuda: StreamingCuda, tmp_path: Path) -> None:
    server = Server(tmp_path)
    graphs, plain = server.load("graphs", GRAPHS), server.load("plain", instances=2)
    assert all(works(instance, 3) for instance in (*graphs, *plain))

    server.unload("plain", *plain)
    assert (server.account.idle_bytes, server.account.used_bytes) == (0, cuda.device_bytes())
    assert works(graphs[0], 3)
    server.unload("graphs", *graphs)
    assert (server.account.used_bytes, server.account.idle_bytes, cuda.left()) == (0, 0, 0)


def test_a_batch_without_memory_is_unavailable_and_says_what_it_needs(
    cuda: StreamingCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, errors = Server(tmp_path, memory_pool_byte_size="3000000"), list[ServingError]()
    (inner,) = server.load("inner", memory=[1 << 20])
    meanwhile(monkeypatch, inner, errors)
    (outer,) = server.load("outer", program="outer", memory=[2 << 20])

    assert works(outer, 3)
    (error,) = errors
    free = 3000000 - cuda.device_bytes()
    assert (error.code, error.message) == (
        Code.UNAVAILABLE,
        f"GPU 0 has not enough memory: a batch needs {(1 << 20) + TENSORS} bytes, {free} are free",
    )
    assert "memory-pool-byte-size" in error.hint
    assert works(inner, 2)  # the idle block of the other model gives way
    assert cuda.device_bytes() < 2 << 20


def test_a_graph_keeps_its_block(cuda: StreamingCuda, tmp_path: Path) -> None:
    server = Server(tmp_path)
    (graphs,) = server.load("graphs", GRAPHS)
    kept = server.account.used_bytes
    (other,) = server.load("other")

    assert kept == cuda.device_bytes() // 2 > 0
    for launches in (1, 2, 3):
        assert works(graphs, 3)
        assert works(graphs, 5)  # not by a graph, in the same block
        assert works(other, 3)
        assert (cuda.launches, server.account.used_bytes) == (launches, kept)
    assert (len(cuda.given), len(set(cuda.given))) == (2, 2)
