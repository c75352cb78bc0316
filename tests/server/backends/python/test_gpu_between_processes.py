"""Tensors of GPUs between worker processes and the server, with GPUs that are pretended; `tests/gpu` has real ones.

The memory of these GPUs is files that every process maps which opens their handle, so elements really cross.
"""

import ctypes
import gc
import os
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.support import pretended_cuda
from tests.support.models import write_model
from tests.support.pretended_cuda import PretendedCuda

import charonia
from charonia import Code, ServingError
from charonia.server.channel import cuda_driver

ROOT = str(Path(__file__).parents[4])
VALUES = np.arange(100_000, dtype=np.float32)  # more than goes inline

CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "PID" data_type: TYPE_INT64 dims: [ 1 ] }
parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "no" } }
"""

HEAD = """
import ctypes, os, signal, sys, time
import numpy as np
import triton_python_backend_utils as pb_utils
sys.path.insert(0, {root!r})
from tests.support import pretended_cuda

if pretended_cuda.is_installed():
    cuda = ctypes.CDLL(pretended_cuda.LIBRARY)  # in a thread of the server
else:
    cuda = pretended_cuda.install({folder!r})

def on_gpu(name, source):
    return pb_utils.Tensor.from_dlpack(name, source)

def given(request):
    return pb_utils.get_input_tensor_by_name(request, "IN")

def answer(tensor, **more):
    pid = pb_utils.Tensor("PID", np.full(1, os.getpid(), np.int64))
    return pb_utils.InferenceResponse([tensor, pid])

def call(model, tensor, on_gpu=True):
    memory = pb_utils.TRITONSERVER_MEMORY_GPU if on_gpu else pb_utils.TRITONSERVER_MEMORY_CPU
    return pb_utils.InferenceRequest(
        model_name=model, requested_output_names=["OUT", "PID"], inputs=[tensor],
        preferred_memory=pb_utils.PreferredMemory(memory, 0),
    ).exec()

def outputs(response):
    assert not response.has_error(), response.error().message()
    return [pb_utils.get_output_tensor_by_name(response, name) for name in ("OUT", "PID")]

class TritonPythonModel:
    def execute(self, requests):
        return [self.one(request) for request in requests]

    def one(self, request):
"""

MAKER = "return answer(on_gpu('OUT', cuda.put(given(request).as_numpy() * 2)))"
ADDER = """
tensor = given(request)
assert not tensor.is_cpu()
return answer(on_gpu("OUT", cuda.put(cuda.adopt(tensor).elements + 1)))
"""


class Bench:
    """A repository, the server that serves it in this process, and the GPUs."""

    def __init__(self, folder: Path, cuda: PretendedCuda) -> None:
        self.cuda = cuda
        self.folder = folder
        self.gpu_folder = folder / "gpu"
        self.repository = folder / "models"

    def model(self, name: str, body: str) -> None:
        """Write a model that takes tensors of GPUs."""
        lines = textwrap.indent(textwrap.dedent(body).strip(), " " * 8)
        head = HEAD.format(root=ROOT, folder=str(self.gpu_folder))
        write_model(self.repository, name, f"{head}{lines}\n", config=CONFIG)

    def serve(self) -> charonia.Server:
        return charonia.Server(self.repository)

    def counts(self) -> dict[str, int]:
        """Return how often elements were copied to the memory of the CPU, by models and by the driver."""
        return {"models": self.cuda.noted("cpu"), "driver": self.cuda.noted("cuMemcpyDtoH_v2")}

    def opened_here(self) -> int:
        return self.cuda.noted("open", os.getpid())

    def is_clear(self) -> bool:
        """Return whether, soon, no memory of a GPU is allocated and none is open."""
        return soon(lambda: self.cuda.files() == set() and self.cuda.noted("open") == self.cuda.noted("close"))


def soon(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 200
    while not condition() and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    return condition()


NO_COPIES = {"models": 0, "driver": 0}


@pytest.fixture
def cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedCuda]:
    (tmp_path / "gpu").mkdir()
    monkeypatch.setattr(ctypes, "CDLL", ctypes.CDLL)  # to be put back
    pretended = pretended_cuda.install(tmp_path / "gpu")
    cuda_driver.driver.cache_clear()
    yield pretended
    cuda_driver.driver.cache_clear()


@pytest.fixture
def bench(tmp_path: Path, cuda: PretendedCuda) -> Bench:
    return Bench(tmp_path, cuda)


def test_a_tensor_goes_from_worker_to_worker_and_back_without_a_copy(bench: Bench) -> None:
    bench.model("adder", ADDER)
    bench.model(
        "front",
        """
        mine = cuda.put(given(request).as_numpy())
        out, pid = outputs(call("adder", on_gpu("IN", mine)))
        assert not out.is_cpu()
        assert pid.is_cpu() and pid.as_numpy()[0] != os.getpid()
        assert mine.elements[3] == 3
        return answer(pb_utils.Tensor("OUT", cuda.adopt(out).elements.copy()))
        """,
    )

    with bench.serve() as server:
        result = server.infer("front", {"IN": VALUES})["OUT"]

        assert result.tolist() == (VALUES + 1).tolist()
        assert bench.counts() == NO_COPIES
        assert bench.opened_here() == 0, "the server only passes handles on"
        assert bench.cuda.noted("open") == 2
        assert bench.is_clear()


def test_a_worker_that_is_killed_takes_its_tensors_with_it_and_nothing_else(bench: Bench) -> None:
    bench.model("maker", MAKER)
    bench.model("adder", ADDER)
    bench.model(
        "front",
        """
        values = pb_utils.Tensor("IN", given(request).as_numpy())
        out, pid = outputs(call("maker", values))
        number = int(pid.as_numpy()[0])
        os.kill(number, signal.SIGKILL)
        while os.path.exists(f"/proc/{number}"):
            time.sleep(0.01)
        failed = call("adder", on_gpu("IN", out))
        return pb_utils.InferenceResponse(error=failed.error())
        """,
    )

    with bench.serve() as server:
        with pytest.raises(ServingError, match="the worker process that made it has ended") as caught:
            server.infer("front", {"IN": VALUES})

        assert caught.value.code is Code.UNAVAILABLE
        assert server.infer("maker", {"IN": VALUES})["OUT"].tolist() == (VALUES * 2).tolist(), "by its successor"
        assert soon(lambda: bench.cuda.noted("open") == bench.cuda.noted("close"))


@pytest.mark.parametrize("reason", ["no handle", "no GPU", "exclusive"])
def test_what_the_server_cannot_open_is_copied_by_the_model(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    if reason == "no GPU":
        monkeypatch.setattr(bench.cuda, "_gpus", ())
    if reason == "exclusive":
        bench.cuda.compute_mode = 3
    bench.model("maker", MAKER.replace("* 2)", f"* 2, has_handle={reason != 'no handle'})"))
    bench.model("adder", "return answer(pb_utils.Tensor('OUT', given(request).as_numpy() + 1))")
    bench.model(
        "front",
        """
        out, _ = outputs(call("maker", pb_utils.Tensor("IN", given(request).as_numpy())))
        assert out.is_cpu()
        out, _ = outputs(call("adder", on_gpu("IN", out)))
        return answer(out)
        """,
    )

    with bench.serve() as server:
        assert server.infer("front", {"IN": VALUES})["OUT"].tolist() == (VALUES * 2 + 1).tolist()

        assert bench.counts() == {"models": 1, "driver": 0}
        assert bench.is_clear()
