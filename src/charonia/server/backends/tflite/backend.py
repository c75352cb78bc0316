"""Completes configurations from TensorFlow Lite models, loads them, and runs batches."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert.interpreter import Interpreter

from charonia.config.complete import Signature, SignatureTensor, check_signature
from charonia.config.model import ModelConfig, ModelInput, ModelOutput
from charonia.config.problems import Problem, check_problems
from charonia.config.sequence_tensors import seen_by_model
from charonia.core.dtypes import BY_NUMPY, DataType
from charonia.core.errors import Code, invalid, unsupported
from charonia.core.statistics import MemoryUsage
from charonia.core.tensor import Array
from charonia.server.backends.api import BackendSettings, ModelFiles, Placement
from charonia.server.backends.array_backend import (
    ArrayBackend,
    ArrayInstance,
    SharingModel,
    inputs_hint,
    load_error,
    plain_error,
)
from charonia.server.backends.parameters import Params, declared_by, parameter

_THREADS = "tflite_num_threads"


@dataclass(frozen=True, slots=True)
class TflitePlan:
    """The parameters of a model; 0 threads are the instance's share of the thread budget."""

    # fmt: off
    threads: int = parameter(_THREADS, "threads of an instance", int, 0, "the instance's share of the cores", ge=0)
    signature: str = parameter("SIGNATURE", "the signature that is served", str, "",
                               "the only one, or `serving_default`")
    # fmt: on


PARAMETERS = Params("tflite", *declared_by(TflitePlan), settings=(_THREADS,))


def read_plan(config: ModelConfig, settings: Mapping[str, str]) -> tuple[TflitePlan, list[Problem]]:
    problems, given = list[Problem](), dict[str, tuple[str, str]]()
    accelerators = config.optimization.execution_accelerators if config.optimization is not None else None
    for index, each in enumerate(accelerators.cpu_execution_accelerator if accelerators is not None else ()):
        place = f"optimization.execution_accelerators.cpu_execution_accelerator[{index}]"
        if each.name != "xnnpack":
            problems.append(Problem(f"{place}.name", f"expected xnnpack, which is always on, got '{each.name}'"))
        if "num_threads" in each.parameters:
            given[_THREADS] = (f"{place}.parameters['num_threads']", each.parameters["num_threads"])
    values = PARAMETERS.values(config, settings, given)
    return values.into(TflitePlan), [*problems, *values.problems]


SERVING_DEFAULT = "serving_default"
"""Name of the signature that converters write by default."""

_LOAD_HINTS = {
    "valid Flatbuffer": "the file is not a TensorFlow Lite model, or is incomplete",
    "unresolved custom op": "LiteRT lacks the operator: convert the model with built-in operators only",
    "Select TensorFlow op": "LiteRT lacks the operator: convert the model with built-in operators only",
}
"""Hint by a part of LiteRT's message."""


@dataclass(frozen=True, slots=True)
class GraphTensor:
    """An input or output of a subgraph.

    Attributes:
        name: Its name: that in the signature, or the tensor's own where the configuration or the file has no other.
        shape: Its shape, -1 for a variable dimension.
        scale: Scale of a quantised tensor, 0 for others.
    """

    name: str
    index: int
    datatype: DataType
    shape: tuple[int, ...]
    scale: float
    zero_point: int


@dataclass(frozen=True, slots=True)
class TfliteProgram:
    """One signature of a model.

    Attributes:
        content: The content of the file.
        subgraph: Index of the subgraph that computes.
    """

    content: bytes
    subgraph: int
    inputs: tuple[GraphTensor, ...]
    outputs: tuple[GraphTensor, ...]

    @property
    def signature(self) -> Signature:
        """The inputs and outputs as others know them."""
        inputs, outputs = (
            tuple(SignatureTensor(p.name, p.datatype, p.shape) for p in ps) for ps in (self.inputs, self.outputs)
        )
        return Signature(inputs, outputs)


def read_program(path: Path, config: ModelConfig, signature: str) -> TfliteProgram:
    """Read a model.

    Its first dimension counts as variable where the configuration batches and the model, made for one size, computes
    batches of another as well.

    Args:
        signature: Name of its signature, "" for the only one, or `serving_default`.

    Raises:
        ServingError: INVALID_ARG when LiteRT cannot load the file, or there is no such signature; UNSUPPORTED for a
            tensor that the protocol lacks.
    """
    content = path.read_bytes()
    if not content:
        raise invalid(f"cannot load {path.name}: the file is empty")
    try:
        interpreter = Interpreter(model_content=content, num_threads=1)
        interpreter.allocate_tensors()
    except (ValueError, RuntimeError) as error:
        raise load_error(path, error, _LOAD_HINTS) from error
    native = interpreter._interpreter
    named, subgraph = _signature(native, config.name, signature)
    inputs = named["inputs"] if named else {native.TensorName(i, 0): i for i in native.InputIndices()}
    outputs = named["outputs"] if named else {native.TensorName(i, 0): i for i in native.OutputIndices()}
    program = TfliteProgram(
        content,
        subgraph,
        tuple(_port(native, subgraph, config, config.input, *item) for item in inputs.items()),
        tuple(_port(native, subgraph, config, config.output, *item) for item in outputs.items()),
    )
    return _opened(program, native) if config.max_batch_size > 0 else program


def interpreter_of(program: TfliteProgram, threads: int, batch: int) -> Any:
    """Return the native interpreter of an instance, which reads the content of the file where it is.

    If no dimension but the batch is variable, its memory is laid out now, as LiteRT holds the GIL meanwhile.

    Args:
        program: The model, which must live as long.
        batch: The largest batch, 0 for a model without batching.
    """
    lead = (batch,) if batch else ()
    shapes = {port.index: (*lead, *port.shape[len(lead) :]) for port in program.inputs}
    try:
        native = Interpreter(model_content=program.content, num_threads=threads)._interpreter
        if all(-1 not in shape for shape in shapes.values()):
            for index, shape in shapes.items():
                native.ResizeInputTensor(index, np.array(shape, np.int32), False, program.subgraph)
            native.AllocateTensors(program.subgraph)
    except (ValueError, RuntimeError) as error:
        raise plain_error("LiteRT cannot load the model", error, Code.INVALID_ARG) from error
    return native


def quantised(program: TfliteProgram) -> list[str]:
    """Return a sentence for each quantised input and output: its numbers are sent as they are."""
    return [
        f"{kind} '{port.name}': quantised, a number q stands for {port.scale:g} * (q - {port.zero_point})"
        for kind, ports in (("input", program.inputs), ("output", program.outputs))
        for port in ports
        if port.scale
    ]


def _signature(native: Any, model: str, wanted: str) -> tuple[Mapping[str, Mapping[str, int]], int]:
    """Return the tensors of a signature and its subgraph; nothing and the first subgraph for a file without any."""
    known = native.GetSignatureDefs() or {}
    name = wanted or (next(iter(known)) if len(known) == 1 else SERVING_DEFAULT)
    if name in known:
        return known[name], native.GetSubgraphIndexFromSignature(name)
    if known:
        raise invalid(
            f"model '{model}' has no signature '{name}'",
            hint=f"the parameter SIGNATURE names one of {', '.join(sorted(known))}",
        )
    if wanted:
        raise invalid(f"model '{model}' has no signature '{wanted}': the file has none", hint="leave SIGNATURE out")
    return {}, 0


def _port(
    native: Any,
    subgraph: int,
    config: ModelConfig,
    configured: Sequence[ModelInput | ModelOutput],
    name: str,
    index: int,
) -> GraphTensor:
    own = native.TensorName(index, subgraph)
    if any(tensor.name == own for tensor in configured):
        name = own
    kind = native.TensorType(index, subgraph)
    datatype = DataType.BYTES if kind is np.bytes_ else BY_NUMPY.get(np.dtype(kind)) if kind else None
    if datatype is None:
        what = np.dtype(kind).name if kind else "of an unknown type"
        raise unsupported(f"model '{config.name}': tensor '{name}' is {what}, which cannot be sent")
    shape = tuple(int(size) for size in native.TensorSizeSignature(index, subgraph))
    scale, zero_point = native.TensorQuantization(index, subgraph)
    return GraphTensor(name, index, datatype, shape, float(scale), int(zero_point))


def _opened(program: TfliteProgram, native: Any) -> TfliteProgram:
    """Return the program with a variable first dimension, if a batch of two more than the model's own size fits."""
    ports = (*program.inputs, *program.outputs)
    fixed = {port.shape[0] for port in ports if port.shape and port.shape[0] != -1}
    if not fixed or any(not port.shape for port in ports):
        return program
    size = max(fixed) + 2
    try:
        for port in program.inputs:
            shape = (size, *(max(1, dim) for dim in port.shape[1:]))
            native.ResizeInputTensor(port.index, np.array(shape, np.int32), False, program.subgraph)
        native.AllocateTensors(program.subgraph)
    except (ValueError, RuntimeError):
        return program
    if any(native.TensorSize(port.index, program.subgraph)[0] != size for port in program.outputs):
        return program
    inputs, outputs = (
        tuple(replace(port, shape=(-1, *port.shape[1:])) for port in ports)
        for ports in (program.inputs, program.outputs)
    )
    return replace(program, inputs=inputs, outputs=outputs)


class TfliteInstance(ArrayInstance):
    """An instance."""

    def __init__(self, native: Any, program: TfliteProgram, config: ModelConfig) -> None:
        super().__init__(config)
        self._native = native
        self._program = program  # the interpreter reads the content of its file
        self._subgraph = program.subgraph
        self._inputs = {port.name: port.index for port in program.inputs}
        self._outputs = {port.name: port.index for port in program.outputs}
        self._shapes: list[tuple[int, ...]] = []

    def close(self) -> None:
        super().close()
        self._native = None

    def run(self, names: Sequence[str], feed: dict[str, Array]) -> Sequence[Array]:
        native, subgraph = self._native, self._subgraph
        try:
            shapes = [array.shape for array in feed.values()]
            if shapes != self._shapes:
                self._shapes = []
                for name, array in feed.items():
                    native.ResizeInputTensor(self._inputs[name], np.array(array.shape, np.int32), False, subgraph)
                native.AllocateTensors(subgraph)
                self._shapes = shapes
            for name, array in feed.items():
                native.SetTensor(self._inputs[name], array, subgraph)
            native.Invoke(subgraph)
            return [native.GetTensor(self._outputs[name], subgraph) for name in names]  # copies
        except (ValueError, RuntimeError) as error:
            self._shapes = []
            failure = plain_error("LiteRT failed", error, Code.INTERNAL)
            failure.hint = inputs_hint(feed)
            raise failure from error


class TfliteModel(SharingModel):
    """A loaded version.

    Args:
        threads: Threads of an instance, 0 for its share of the thread budget.
    """

    def __init__(self, program: TfliteProgram, config: ModelConfig, threads: int) -> None:
        super().__init__()
        self._program = program
        self._config = config
        self._threads = threads
        self._count = 0

    async def create_instance(self, placement: Placement) -> TfliteInstance:
        threads = self._threads or placement.threads
        native = await asyncio.to_thread(interpreter_of, self._program, threads, self._config.max_batch_size)
        self._count += 1
        return TfliteInstance(native, self._program, self._config)

    def memory(self) -> list[MemoryUsage]:
        """Return the size of the file, and as much for each instance, whose kernels have the weights in their order."""
        return [MemoryUsage("CPU", 0, (1 + self._count) * len(self._program.content))]


class TfliteBackend(ArrayBackend[TflitePlan, TfliteModel]):
    """The `tflite` backend, which is also `armnn_tflite`."""

    name = "tflite"
    parameters = PARAMETERS
    read_plan = staticmethod(read_plan)

    async def inspect(
        self, files: ModelFiles, config: ModelConfig, plan: TflitePlan
    ) -> tuple[Signature, Sequence[str]]:
        program = await asyncio.to_thread(read_program, self.path(files, config), config, plan.signature)
        return program.signature, quantised(program)

    async def open(
        self, files: ModelFiles, config: ModelConfig, plan: TflitePlan, settings: BackendSettings
    ) -> TfliteModel:
        config = seen_by_model(config)
        program = await asyncio.to_thread(read_program, self.path(files, config), config, plan.signature)
        check_problems(config.name, check_signature(config, program.signature))
        return TfliteModel(program, config, plan.threads)
