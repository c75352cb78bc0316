"""Instances that are forked from a process with the imported file: what they share, and what is refused."""

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from tests.support.process import eventually
from tests.support.python_model import Loaded, config, request, write

from charonia.config.kinds import InstanceKind
from charonia.config.model import ModelConfig, ModelInput, ModelOutput
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError
from charonia.core.request import InferRequest
from charonia.core.tensor import Tensor
from charonia.server.backends.api import BackendSettings, Outputs, Placement
from charonia.server.backends.python.backend import PythonBackend
from charonia.server.backends.workers.template import WorkerTemplate

pytestmark = pytest.mark.skipif(not WorkerTemplate.is_possible(), reason="needs Linux")

CLASS = """
import os

import numpy as np
import triton_python_backend_utils as pb_utils

WEIGHTS = np.ones(10)
IMPORTED_IN = os.getpid()


class TritonPythonModel:
    def initialize(self, arguments):
        self.name = arguments["model_instance_name"]

    def execute(self, requests):
        pb_utils.Logger.log_info(self.name)
        found = np.array([IMPORTED_IN, os.getpid(), os.getppid()], np.int64)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", found)]) for _ in requests]
"""
OBJECT = """
import os

import charonia


@charonia.model(name="m", share_memory=True)
class Weights:
    def __init__(self, device):
        self.made_in, self.device = os.getpid(), device

    def __call__(self, x: int) -> list[int]:
        return [self.made_in, os.getpid(), os.getppid() if self.device == "cpu" else 0]
"""
SHARING = config(DataType.INT64, SHARE_MEMORY="true")


async def loaded(
    folder: Path, code: str, *names: str, kind: InstanceKind = InstanceKind.KIND_CPU, cfg: ModelConfig = SHARING
) -> list[Loaded]:
    """Load a model, and return its instances."""
    model = await PythonBackend().load(write(folder, code), cfg, BackendSettings())
    try:
        return [Loaded(model, await model.create_instance(Placement(name, kind))) for name in names]
    except BaseException:
        await model.aclose()
        raise


async def pids(instance: Loaded) -> list[int]:
    """Return the process of the import, that of the instance, and its parent."""
    (answer,) = await instance.run([request(np.zeros(1, np.int64), DataType.INT64)])
    assert isinstance(answer, Outputs), answer
    return [int(pid) for pid in answer.tensors[0].array]


async def test_instances_are_forks_of_one_process_that_ends_with_the_model(tmp_path: Path) -> None:
    first, second = await loaded(tmp_path, CLASS, "m_0_0", "m_0_1")
    (imported, one, parent), (same, other, _) = await pids(first), await pids(second)

    assert imported == same == parent
    assert len({imported, one, other}) == 3
    await first._instance.aclose()
    await second.close()
    eventually(lambda: not psutil.pid_exists(imported))


async def test_the_object_of_a_class_is_made_before_the_fork(tmp_path: Path) -> None:
    cfg = replace(
        SHARING,
        input=(ModelInput("x", DataType.INT64, dims=(1,)),),
        output=(ModelOutput("output", DataType.INT64, (-1,)),),
    )
    (only,) = await loaded(tmp_path, OBJECT, "m_0_0", cfg=cfg)
    inputs = {"x": Tensor("x", DataType.INT64, np.zeros(1, np.int64))}
    (answer,) = await only.run([InferRequest("m", inputs)])

    assert isinstance(answer, Outputs), answer
    made, own, parent = answer.tensors[0].array.tolist()
    assert made == parent != own
    await only.close()


async def test_an_instance_that_ends_is_forked_again(tmp_path: Path) -> None:
    (only,) = await loaded(tmp_path, CLASS, "m_0_0")
    imported, pid, _ = await pids(only)
    os.kill(pid, signal.SIGKILL)
    while only.instance.pid in (0, pid) or only.instance.health.problem:
        await asyncio.sleep(0.01)

    assert (await pids(only))[::2] == [imported, imported]
    await only.close()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n", "1 threads"),
        ("raise ValueError('no weights')\n", "no weights"),
    ],
)
def test_a_file_that_cannot_be_forked_is_refused(tmp_path: Path, code: str, message: str) -> None:
    with pytest.raises(ServingError, match=message):
        asyncio.run(loaded(tmp_path, code + CLASS, "m_0_0"))


def test_gpus_and_threads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ServingError, match="cannot be met on a GPU"):
        asyncio.run(loaded(tmp_path, CLASS, "m_0_0", kind=InstanceKind.KIND_GPU))
    threaded = config(DataType.INT64, SHARE_MEMORY="true", EXECUTION_MODE="thread")
    with pytest.raises(ServingError, match="SHARE_MEMORY cannot be met with EXECUTION_MODE thread"):
        asyncio.run(PythonBackend().load(write(tmp_path, CLASS), threaded, BackendSettings()))
