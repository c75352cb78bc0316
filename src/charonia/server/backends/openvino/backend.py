"""Reads models with OpenVINO, completes configurations, compiles models for their shapes, and runs batches."""

import asyncio
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import openvino

from charonia.config.complete import Signature, SignatureTensor, check_signature
from charonia.config.model import ModelConfig, ModelInput, ModelOutput
from charonia.config.parameters import SERVER_PARAMETERS
from charonia.config.problems import Problem, check_problems
from charonia.config.sequence_tensors import seen_by_model
from charonia.core.dtypes import BY_NUMPY, DataType
from charonia.core.errors import Code, ServingError, invalid, unsupported
from charonia.core.statistics import MemoryUsage
from charonia.core.tensor import Array
from charonia.server.backends.api import BackendSettings, ModelFiles, Placement
from charonia.server.backends.array_backend import (
    ArrayBackend,
    ArrayInstance,
    SharingModel,
    inputs_hint,
    load_error,
    model_file,
    plain_error,
    weights_bytes,
)
from charonia.server.backends.parameters import INVERTED, Param, Params, declared_by, parameter
from charonia.server.machine.memory import release_freed_memory

CPU = "CPU"
THREADS, STREAMS = "INFERENCE_NUM_THREADS", "NUM_STREAMS"

GLOBAL_PROPERTIES = ("COMPILATION_NUM_THREADS", "CACHE_DIR")
"""Properties of OpenVINO itself, not of a device."""

_PRECISION, _MODE, _HINT = "INFERENCE_PRECISION_HINT", "EXECUTION_MODE_HINT", "PERFORMANCE_HINT"


@dataclass(frozen=True, slots=True)
class OpenVinoPlan:
    """The options of a model.

    Attributes:
        opens_batch: Whether a fixed batch dimension is made variable.
        properties: Properties that the model asks for, by OpenVINO's names; without those of `GLOBAL_PROPERTIES`.
    """

    # fmt: off
    opens_batch: bool = parameter("SKIP_OV_DYNAMIC_BATCHSIZE", "keep a fixed batch dimension", INVERTED, True,
                                  "`false`")
    pads: bool = parameter("ENABLE_BATCH_PADDING", "fill every batch up to one size", bool, False)
    reshapes: bool = parameter("RESHAPE_IO_LAYERS", "give the model's inputs the dims of the configuration, -1 for any",
                               bool, False)
    device: str = parameter("TARGET_DEVICE", "another device of OpenVINO: `GPU`, `AUTO`, `HETERO:GPU,CPU`; tried are "
                            "CPU, AUTO and HETERO:CPU", str, CPU)
    extension: str = parameter("CPU_EXTENSION_PATH", "a library with operators that OpenVINO does not have", str, "",
                               "none")
    # fmt: on
    properties: Mapping[str, str] = field(default_factory=dict)
    global_properties: Mapping[str, str] = field(default_factory=dict)

    def defaults(self, instances: int, threads: int) -> dict[str, str]:
        """Return the properties of the CPU that the model does not ask for.

        Args:
            instances: Instances that share the compiled model.
            threads: Threads of each.
        """
        found = {THREADS: str(instances * threads), "ENABLE_CPU_PINNING": "NO"}
        if _HINT not in self.properties:  # else OpenVINO chooses the streams
            found[STREAMS] = str(instances)
        if not {_PRECISION, _MODE} & self.properties.keys():
            found |= {_PRECISION: "f32", _MODE: "ACCURACY"}
        return {key: text for key, text in found.items() if key not in self.properties}


# fmt: off
PARAMETERS = Params(
    "openvino",
    *declared_by(OpenVinoPlan),
    Param(THREADS, "threads of all streams together", shown="the share of the cores of all instances"),
    Param(STREAMS, "inferences at a time; `AUTO` or `NUMA` leave it to OpenVINO", shown="the number of instances"),
    Param(_HINT, "`LATENCY` or `THROUGHPUT`; OpenVINO then chooses the streams, unless `NUM_STREAMS` is given",
          shown="none"),
    Param("HINT_BF16", "compute in bf16", bool, False),
    Param(_PRECISION, "`bf16`, `f16` or `f32`", shown="`f32`"),
    Param(_MODE, "`PERFORMANCE` leaves the precision to OpenVINO", shown="`ACCURACY`"),
    Param("COMPILATION_NUM_THREADS", "threads that compile the model", shown="OpenVINO's"),
    Param("CACHE_DIR", "a folder for compiled models", shown="none"),
    settings=None,
)
# fmt: on
_OWN = ("HINT_BF16", *(each.name for each in declared_by(OpenVinoPlan)))


def read_plan(config: ModelConfig, settings: Mapping[str, str]) -> tuple[OpenVinoPlan, list[Problem]]:
    values = PARAMETERS.values(config, settings)
    parameters = {name: text for name, (_, text) in values.entries.items()}
    parameters |= {name: text for name, text in config.parameters.items() if name not in SERVER_PARAMETERS}
    properties = {name: text for name, text in parameters.items() if name not in (*_OWN, *GLOBAL_PROPERTIES)}
    if values["HINT_BF16"]:
        properties.setdefault(_PRECISION, "bf16")
    plan = values.into(
        OpenVinoPlan,
        properties=properties,
        global_properties={name: parameters[name] for name in GLOBAL_PROPERTIES if name in parameters},
    )
    return plan, values.problems


_TYPES = {f"{d.numpy.kind}{8 * d.byte_size}": d for d in BY_NUMPY.values()} | {
    "boolean": DataType.BOOL,
    "bf16": DataType.BF16,
}
"""Datatype by OpenVINO's name of the element type."""

SOURCE = re.compile(
    r"Exception from \S+:\d+:|Check '[^']*' failed at \S+:\d+:|FrontEnd API failed with \w+:|\[ ?\w+ ?\]"
)
_LOAD_HINTS = {
    "Unable to read the model": "the file is not of this format, is incomplete, or was written for a newer OpenVINO",
    "Empty weights data": "the .bin file belongs beside the .xml file, under the same name",
    "Incorrect weights": "the .bin file is incomplete, or a Git LFS pointer",
    "No conversion rule found": "CPU_EXTENSION_PATH loads operators that OpenVINO does not have",
    "doesn't contain the operation": "CPU_EXTENSION_PATH loads operators that OpenVINO does not have",
}
"""Hint by a part of OpenVINO's message."""

_log = logging.getLogger(__name__)

# The first look at a tensor's array must not happen in two threads: they would wait for one another for ever, one in a
# static initialiser of the bindings, the other for the GIL (seen in 2026.4).
openvino.Tensor(np.zeros(1, np.float32)).data  # noqa: B018 # it is a property that does something


@dataclass(frozen=True, slots=True)
class NetworkTensor:
    """An input or output of a model.

    Attributes:
        name: Its name, the configured one where it has several.
        index: Its place among the inputs, or the outputs.
        shape: Its shape, -1 for a variable dimension; None for an unknown rank.
    """

    name: str
    index: int
    kind: Any
    shape: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Network:
    """A model in the shapes that it is served with.

    Attributes:
        batch: The size that every batch is filled up to, 0 for none.
    """

    model: Any
    inputs: tuple[NetworkTensor, ...]
    outputs: tuple[NetworkTensor, ...]
    batch: int


def new_core(plan: OpenVinoPlan) -> Any:
    """Return an OpenVINO of the model's own. Raises ServingError: INVALID_ARG when it refuses a parameter."""
    try:
        core = openvino.Core()
        if plan.extension:
            core.add_extension(plan.extension)
        core.set_property(dict(plan.global_properties))
    except RuntimeError as error:
        raise plain_error("OpenVINO refuses a parameter of the model", error, Code.INVALID_ARG, SOURCE) from error
    return core


def read(core: Any, path: Path, config: ModelConfig, plan: OpenVinoPlan) -> Network:
    """Read a model, and give its inputs the shapes that the configuration and the plan ask for.

    Raises:
        ServingError: INVALID_ARG when OpenVINO cannot read the file or the model cannot have the shapes, UNSUPPORTED
            for a model that keeps state.
    """
    try:
        model = core.read_model(path)
    except RuntimeError as error:
        raise load_error(path, error, _LOAD_HINTS, SOURCE) from error
    if not model.inputs or not model.outputs:
        raise invalid(f"cannot load {path.name}: it has no {'outputs' if model.inputs else 'inputs'}")
    if model.get_variables():
        raise unsupported(
            f"model '{config.name}' keeps state from one inference to the next, which its clients would share",
            hint="convert it without stateful transformations, so that the state is an input and an output",
        )
    shapes, batch = _shapes(model, config, plan)
    try:
        if shapes:
            model.reshape({port: openvino.PartialShape(list(shape)) for port, shape in shapes.items()})
    except RuntimeError as error:
        failure = plain_error(
            f"model '{config.name}' cannot have the configured shapes", error, Code.INVALID_ARG, SOURCE
        )
        hint = "set max_batch_size to 0, or export the model with a variable first dimension"
        raise ServingError(failure.code, failure.message, hint=hint) from error
    outputs = _ports(model.outputs, config.output)
    if config.max_batch_size > 0 and not batch and any(given.shape and given.shape[0] != -1 for given in outputs):
        return read(core, path, config, replace(plan, pads=True))  # a variable batch does not reach the outputs
    return Network(model, _ports(model.inputs, config.input), outputs, batch)


def compile_network(core: Any, network: Network, config: ModelConfig, plan: OpenVinoPlan, threads: int) -> Any:
    """Return the compiled model, for the configured instances with this many threads each.

    Raises:
        ServingError: INVALID_ARG with the reason.
    """
    instances = sum(group.count for group in config.instance_group)
    try:
        wanted = {**plan.defaults(instances, threads), **plan.properties}
        own = _settable(core, plan.device.partition(":")[0].partition(".")[0])
        known = set(own)
        # A virtual device (AUTO, HETERO) has few properties; those of the devices behind it are set on them.
        for name in (CPU,) if plan.device == CPU else core.available_devices:
            settable = _settable(core, name)
            known |= settable
            core.set_property(name, {key: text for key, text in wanted.items() if key in settable})
        for sentence in PARAMETERS.remarks(config, known):
            _log.warning(sentence)
        asked = {key: text for key, text in plan.properties.items() if key in own}
        return core.compile_model(network.model, plan.device, asked)
    except RuntimeError as error:
        raise plain_error(f"OpenVINO cannot compile model '{config.name}'", error, Code.INVALID_ARG, SOURCE) from error


def loses_errors(compiled: Any, network: Network, plan: OpenVinoPlan) -> bool:
    """Whether a synchronous run could go on with memory of the wrong size where shapes do not fit, without an error.

    OpenVINO (seen in 2026.4) does so in a dynamic model that has one thread. An asynchronous run reports the error, at
    the price of a change of threads.
    """
    if not network.model.is_dynamic():
        return False
    return plan.device != CPU or compiled.get_property(THREADS) < 2


def follows_batch(network: Network) -> bool:
    """Whether the size of the batch decides every shape within a model: a size that ran once then always runs."""
    shapes = [tensor.shape or (-1, -1) for tensor in network.inputs]
    if any(-1 in shape[1:] for shape in shapes):
        return False
    model = network.model.clone()
    try:
        model.reshape({index: openvino.PartialShape([1, *shape[1:]]) for index, shape in enumerate(shapes)})
    except RuntimeError:
        return False
    return not any(output.partial_shape.is_dynamic for node in model.get_ops() for output in node.outputs())


def signature_of(network: Network, config: ModelConfig) -> Signature:
    """Return a model's inputs and outputs.

    Raises:
        ServingError: UNSUPPORTED for a tensor that the protocol lacks, or whose rank neither the model nor the
            configuration tells.
    """
    inputs = tuple(_signature(port, config.input, network, config, "input") for port in network.inputs)
    return Signature(
        inputs, tuple(_signature(port, config.output, network, config, "output") for port in network.outputs)
    )


def _settable(core: Any, device: str) -> frozenset[str]:
    known = core.get_property(device, "SUPPORTED_PROPERTIES")
    return frozenset(key for key, access in known.items() if access == "RW")


def _shapes(model: Any, config: ModelConfig, plan: OpenVinoPlan) -> tuple[dict[Any, tuple[int, ...]], int]:
    """Return the new shape of each input whose shape changes, and the size that batches are filled up to."""
    batch = 0
    shapes = {}
    dims = {tensor.name: tensor.inner_dims for tensor in config.input}
    for port, model_input in zip(model.inputs, _ports(model.inputs, config.input), strict=True):
        shape = model_input.shape
        if plan.reshapes and model_input.name in dims:
            own = shape[:1] if shape else (-1,)
            shape = (*own, *dims[model_input.name]) if config.max_batch_size > 0 else dims[model_input.name]
        if config.max_batch_size > 0 and shape:
            size = _batch_size(shape[0], config, plan)
            batch = max(batch, size)
            shape = (size or -1, *shape[1:])
        if shape is not None and shape != model_input.shape:
            shapes[port] = shape
    return shapes, batch


def _batch_size(own: int, config: ModelConfig, plan: OpenVinoPlan) -> int:
    """Return the size that all batches have, 0 for a variable one."""
    most = config.max_batch_size
    size = most if own == -1 or plan.opens_batch else own
    if size < most:
        raise invalid(
            f"model '{config.name}': max_batch_size is {most}, and the model takes batches of {own}",
            hint="without SKIP_OV_DYNAMIC_BATCHSIZE its batch dimension becomes variable",
        )
    if plan.pads or own == size == 1:
        return size
    if own != -1 and not plan.opens_batch:
        raise invalid(
            f"model '{config.name}' takes batches of {own} only",
            hint="ENABLE_BATCH_PADDING fills up smaller ones; without SKIP_OV_DYNAMIC_BATCHSIZE any size is possible",
        )
    return 0


def _ports(ports: Sequence[Any], configured: Sequence[ModelInput | ModelOutput]) -> tuple[NetworkTensor, ...]:
    found = []
    for index, port in enumerate(ports):
        names = port.names
        known = (tensor.name for tensor in configured if tensor.name in names)
        name = next(known, min(names))
        shape = port.partial_shape
        sizes = None if shape.rank.is_dynamic else tuple(-1 if d.is_dynamic else d.get_length() for d in shape)
        found.append(NetworkTensor(name, index, port.element_type, sizes))
    return tuple(found)


def _signature(
    port: NetworkTensor,
    configured: Sequence[ModelInput | ModelOutput],
    network: Network,
    config: ModelConfig,
    word: str,
) -> SignatureTensor:
    kind = port.kind.get_type_name()
    datatype = _TYPES.get(kind)
    if datatype is None:
        hint = "the ONNX model that it was made from runs in ONNX Runtime" if kind == "string" else ""
        raise unsupported(f"model '{config.name}': {word} '{port.name}' is {kind}, which cannot be sent", hint=hint)
    shape = port.shape
    if shape is None:
        own = next((tensor.inner_dims for tensor in configured if tensor.name == port.name), None)
        if own is None:
            raise unsupported(
                f"model '{config.name}': the number of dimensions of {word} '{port.name}' is unknown",
                hint=f"give the {word}s in config.pbtxt",
            )
        shape = (-1, *own) if config.max_batch_size > 0 else own
    if network.batch and shape[:1] == (network.batch,):
        shape = (-1, *shape[1:])
    return SignatureTensor(port.name, datatype, shape)


# Beneath `infer` of the request's own class, which looks at the types of all inputs once more.
_infer = next(c for c in openvino.InferRequest.__mro__ if c.__module__.endswith("_pyopenvino")).infer


class OpenVinoInstance(ArrayInstance):
    """An instance.

    Args:
        is_async: Whether runs are asynchronous.
        learns: Whether they need not be for sizes of batches that have run.
    """

    def __init__(
        self, request: Any, network: Network, config: ModelConfig, *, is_async: bool, learns: bool = False
    ) -> None:
        super().__init__(config)
        self._is_async = is_async
        self._learns = learns
        self._proven: set[int] = set()
        self._request = request
        self._batch = network.batch
        self._inputs = {port.name: port for port in network.inputs}
        self._outputs = {port.name: port for port in network.outputs}
        self._datatypes = {plan.name: plan.datatype.numpy for plan in self.outputs}
        lead = 1 if self.is_batched else 0
        # Index, type, name and dims of the outputs whose shape is known before it is computed.
        self._own = [
            (port.index, port.kind, port.name, port.shape[lead:])
            for port in network.outputs
            if port.name in self._datatypes and port.shape is not None and -1 not in port.shape[lead:]
        ]

    def close(self) -> None:
        super().close()
        self._request = None

    def run(self, names: Sequence[str], feed: dict[str, Array]) -> Sequence[Array]:
        request = self._request
        size = next(iter(feed.values())).shape[0] if self.is_batched else 0
        rows = max(size, self._batch) if self.is_batched else 0
        own: dict[str, Array] = {}
        try:
            # A tensor of OpenVINO does not keep its array alive: the dictionaries do.
            for name, array in feed.items():
                port = self._inputs[name]
                if size != rows:
                    array = feed[name] = np.concatenate([array, np.repeat(array[-1:], rows - size, 0)])
                elif not (array.flags.c_contiguous and array.flags.aligned):
                    array = feed[name] = array.copy()
                request.set_input_tensor(port.index, openvino.Tensor(array, array.shape, port.kind))
            for index, kind, name, dims in self._own:
                shape = (rows, *dims) if self.is_batched else dims
                array = own[name] = np.empty(shape, self._datatypes[name])
                request.set_output_tensor(index, openvino.Tensor(array, shape, kind))
            if self._is_async and rows not in self._proven:
                request.start_async()
                request.wait()
                if self._learns:
                    self._proven.add(rows)
            else:
                _infer(request, {}, True, False)
        except RuntimeError as error:
            failure = plain_error("OpenVINO failed", error, Code.INTERNAL, SOURCE)
            failure.hint = inputs_hint(feed)
            raise failure from error
        arrays = [own[name] if name in own else self._copied(name) for name in names]
        return arrays if size == rows else [array[:size] for array in arrays]

    def _copied(self, name: str) -> Array:
        view = self._request.get_output_tensor(self._outputs[name].index).data
        array: Array = view.view(self._datatypes[name]).copy()
        return array


DEFAULT_FILE = "model.xml"


class OpenVinoModel(SharingModel):
    """A loaded version, with the compiled model of all its instances."""

    def __init__(self, path: Path, config: ModelConfig, plan: OpenVinoPlan) -> None:
        super().__init__()
        self._path = path
        self._config = config
        self._plan = plan

    async def create_instance(self, placement: Placement) -> OpenVinoInstance:
        network, compiled = await self.shared("model", lambda: asyncio.to_thread(self._compile, placement.threads))
        is_async = loses_errors(compiled, network, self._plan)
        learns = is_async and self._config.max_batch_size > 0 and follows_batch(network)
        request = compiled.create_infer_request()
        return OpenVinoInstance(request, network, self._config, is_async=is_async, learns=learns)

    def _compile(self, threads: int) -> tuple[Network, Any]:
        core = new_core(self._plan)
        network = read(core, self._path, self._config, self._plan)
        check_problems(self._config.name, check_signature(self._config, signature_of(network, self._config)))
        compiled = compile_network(core, network, self._config, self._plan, threads)
        release_freed_memory()
        self.usage = [MemoryUsage("CPU", 0, weights_bytes(self._path))]
        return network, compiled


class OpenVinoBackend(ArrayBackend[OpenVinoPlan, OpenVinoModel]):
    """The `openvino` backend."""

    name = "openvino"
    parameters = PARAMETERS
    read_plan = staticmethod(read_plan)
    gpu_hint = "use KIND_CPU, and the parameter TARGET_DEVICE for an Intel GPU"

    def path(self, files: ModelFiles, config: ModelConfig) -> Path:
        """Return the model's file, or the folder of a TensorFlow SavedModel."""
        folder = files.version_dir / (config.default_model_filename or DEFAULT_FILE)
        return folder if (folder / "saved_model.pb").is_file() else model_file(files, config, DEFAULT_FILE)

    def remarks(self, config: ModelConfig, settings: Mapping[str, str]) -> Iterator[str]:
        """Yield nothing: only the device knows all of its properties."""
        return iter(())

    async def inspect(
        self, files: ModelFiles, config: ModelConfig, plan: OpenVinoPlan
    ) -> tuple[Signature, Sequence[str]]:
        path = self.path(files, config)

        def inspect() -> Signature:
            try:
                return signature_of(read(new_core(plan), path, config, plan), config)
            finally:
                release_freed_memory()

        return await asyncio.to_thread(inspect), ()

    async def open(
        self, files: ModelFiles, config: ModelConfig, plan: OpenVinoPlan, settings: BackendSettings
    ) -> OpenVinoModel:
        if config.model_operations is not None and config.model_operations.op_library_filename:
            raise unsupported(
                f"model '{config.name}': the openvino backend has no model_operations",
                hint="the parameter CPU_EXTENSION_PATH names a library with operators",
            )
        return OpenVinoModel(self.path(files, config), seen_by_model(config), plan)
