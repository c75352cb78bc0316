"""What the engine says of a Python model whose worker processes die: readiness, index and metrics."""

import os
import signal
from pathlib import Path

import pytest
from tests.support.models import write_model
from tests.support.process import until

from charonia.core.metadata import ModelIndexEntry, ModelState, ServerMetadata
from charonia.core.statistics import WorkerState
from charonia.server.backends.registry import installed_backends
from charonia.server.backends.workers import instance as instance_module
from charonia.server.engine import ModelEngine
from charonia.server.lifecycle.backends import Backends
from charonia.server.lifecycle.lifecycle import Lifecycle, LifecycleOptions

CODE = """\
import os
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        print("process", os.getpid(), "has begun", flush=True)
        with open(os.path.join(args["model_repository"], args["model_instance_name"]), "w") as file:
            file.write(str(os.getpid()))

    def execute(self, requests):
        return []
"""

CONFIG = """\
backend: "python"
input { name: "IN" data_type: TYPE_FP32 dims: 1 }
output { name: "OUT" data_type: TYPE_FP32 dims: 1 }
instance_group { count: 2 kind: KIND_CPU }
"""


async def test_a_model_is_ready_while_one_of_its_workers_is_and_says_what_happened_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance_module, "RESTART_DELAY_S", 0.4)
    folder = write_model(tmp_path, "m", CODE)
    (folder / "config.pbtxt").write_text(CONFIG)

    lifecycle = Lifecycle(LifecycleOptions((tmp_path,), cores=2), Backends(installed_backends()))
    engine = ModelEngine(lifecycle, ServerMetadata("test", "0", ()))
    assert await lifecycle.load_at_start(()) == []

    def index() -> ModelIndexEntry:
        (entry,) = engine.index()
        return entry

    def workers() -> dict[str, WorkerState]:
        (sample,) = engine.samples()
        return {worker.instance: worker for worker in sample.workers}

    def kill(instance: str) -> int:
        pid = int((folder / instance).read_text())
        os.kill(pid, signal.SIGKILL)
        return pid

    assert (await engine.model_ready("m"), index().state, index().reason) == (True, ModelState.READY, "")
    assert all(w.memory_bytes > 1_000_000 and w.restarts == 0 for w in workers().values())

    pid = kill("m_0_1")
    await until(lambda: workers()["m_0_1"].problem)
    assert await engine.model_ready("m")
    assert index().state is ModelState.READY
    assert index().reason.startswith("instance 'm_0_1': its worker has ended and is started again after 0.4 s: ")
    assert f"ended by SIGKILL: often the system's answer to a lack of memory; its last output:\nprocess {pid}" in (
        index().reason
    )

    kill("m_0_0")
    await until(lambda: workers()["m_0_0"].problem)
    assert not await engine.model_ready("m")
    assert workers()["m_0_0"].memory_bytes == 0
    assert index().state is ModelState.READY

    await until(lambda: not index().reason)
    assert await engine.model_ready("m")
    assert [w.restarts for w in workers().values()] == [1, 1]
    await lifecycle.drain()
