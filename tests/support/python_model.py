"""A Python model in a real worker process, or in a thread, without an engine."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from tests.support.closing import close_later

from charonia.config.kinds import InstanceKind
from charonia.config.model import ModelConfig, ModelInput, ModelOutput
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError
from charonia.core.request import CallFrame, InferRequest, RequestedOutput
from charonia.core.tensor import Tensor
from charonia.server.backends.api import (
    AsyncInstance,
    BackendSettings,
    BatchSink,
    LoadedModel,
    ModelFiles,
    Outputs,
    Placement,
    Result,
)
from charonia.server.backends.python.backend import PythonBackend
from charonia.server.backends.workers.instance import PythonInstance
from charonia.server.backends.workers.model import MODE, PROCESS

HEAD = """
import json, os, signal, sys, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

def value_of(request):
    return pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()

def answer(array):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)])

class TritonPythonModel:
"""
"""What models begin with that only lack methods."""

IDENTITY = HEAD + "    def execute(self, requests):\n        return [answer(value_of(r)) for r in requests]\n"

default_mode = PROCESS
"""Where models run whose configuration does not say: tests of both modes set it."""


class Sink:
    def __init__(self, count: int) -> None:
        self.results: list[Result | None] = [None] * count
        self.done: asyncio.Future[ServingError | None] = asyncio.get_running_loop().create_future()

    def respond(self, index: int, result: Result | None, final: bool) -> None:
        assert final
        assert self.results[index] is None
        self.results[index] = result

    def finish(
        self, input_end_ns: int, output_start_ns: int, error: ServingError | None = None, *, leaves_open: bool = False
    ) -> None:
        self.done.set_result(error)

    def is_cancelled(self, index: int) -> bool:
        """Return False: no client leaves."""
        return False

    def frame(self) -> CallFrame:
        return CallFrame("m", "1", "m_0_0")


class Loaded:
    def __init__(self, model: LoadedModel, instance: AsyncInstance) -> None:
        self.model = model
        self._instance = instance
        self._is_closed = False
        close_later(self.close)

    @property
    def instance(self) -> PythonInstance:
        assert isinstance(self._instance, PythonInstance)
        return self._instance

    def start(self, requests: Sequence[InferRequest], sink: BatchSink) -> None:
        self._instance.start(requests, sink)

    def cancel(self, sink: BatchSink, index: int) -> None:
        self._instance.cancel(sink, index)

    async def run(self, requests: Sequence[InferRequest]) -> list[Result]:
        """Run a batch; a failure of the whole batch becomes the result of each request."""
        sink = Sink(len(requests))
        self.start(requests, sink)
        error = await asyncio.wait_for(sink.done, 60)
        return [r if r is not None else error for r in sink.results]  # type: ignore[misc] # one of the two is there

    async def close(self) -> None:
        """Close it; a test that is a coroutine does so at its end."""
        if not self._is_closed:
            self._is_closed = True
            await self._instance.aclose()
            await self.model.aclose()


def config(
    datatype: DataType = DataType.FP32, dims: tuple[int, ...] = (-1,), outputs: int = 1, **parameters: str
) -> ModelConfig:
    """Return the configuration of a model with input IN and outputs OUT, OUT1 and so on."""
    return ModelConfig(
        name="m",
        backend="python",
        max_batch_size=0,
        input=(ModelInput("IN", datatype, dims=dims),),
        output=tuple(ModelOutput("OUT" + (str(i) if i else ""), datatype, dims) for i in range(outputs)),
        parameters=parameters,
    )


def write(folder: Path, code: str) -> ModelFiles:
    """Write a model folder `m` with this model.py."""
    version = folder / "m" / "1"
    version.mkdir(parents=True, exist_ok=True)
    (version / "model.py").write_text(code)
    return ModelFiles(folder / "m", 1, version)


async def load(folder: Path, code: str, cfg: ModelConfig | None = None) -> Loaded:
    cfg = cfg or config()
    cfg = replace(cfg, parameters={MODE: default_mode, **cfg.parameters})
    model = await PythonBackend().load(write(folder, code), cfg, BackendSettings())
    instance = await model.create_instance(Placement("m_0_0", InstanceKind.KIND_CPU))
    return Loaded(model, instance)


def array_of(result: Result | None) -> "np.ndarray":
    """Return the first output."""
    assert isinstance(result, Outputs), result
    return result.tensors[0].array


def error_of(result: Result | None) -> ServingError:
    """Return an error."""
    assert isinstance(result, ServingError)
    return result


def request(array: "np.ndarray", datatype: DataType = DataType.FP32, *outputs: str, **more: object) -> InferRequest:
    return InferRequest(
        "m",
        {"IN": Tensor("IN", datatype, array)},
        outputs=tuple(RequestedOutput(o) for o in outputs),
        **more,  # type: ignore[arg-type] # fields of the request
    )
