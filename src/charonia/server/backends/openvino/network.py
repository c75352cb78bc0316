"""Reads models with OpenVINO, gives them the shapes that they are served with, and compiles them."""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino

from charonia.config.complete import Signature, SignatureTensor
from charonia.config.model import ModelConfig, ModelInput, ModelOutput
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError, invalid, unsupported
from charonia.server.backends.array_backend import plain_error
from charonia.server.backends.model_file import broken_file_hint
from charonia.server.backends.openvino.options import CPU, THREADS, OpenVinoPlan, ineffective_parameters

_TYPES = {
    "boolean": DataType.BOOL,
    "u8": DataType.UINT8,
    "u16": DataType.UINT16,
    "u32": DataType.UINT32,
    "u64": DataType.UINT64,
    "i8": DataType.INT8,
    "i16": DataType.INT16,
    "i32": DataType.INT32,
    "i64": DataType.INT64,
    "f16": DataType.FP16,
    "f32": DataType.FP32,
    "f64": DataType.FP64,
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
        kind: OpenVINO's element type.
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
        model: OpenVINO's model.
        inputs: Its inputs, in order.
        outputs: Its outputs, in order.
        batch: The size that every batch is filled up to, 0 for none.
    """

    model: Any
    inputs: tuple[NetworkTensor, ...]
    outputs: tuple[NetworkTensor, ...]
    batch: int


def new_core(plan: OpenVinoPlan) -> Any:
    """Return an OpenVINO of the model's own.

    Raises:
        ServingError: INVALID_ARG when it refuses a parameter.
    """
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
        refused = plain_error(f"cannot load {path.name}", error, Code.INVALID_ARG, SOURCE)
        hints = (hint for text, hint in _LOAD_HINTS.items() if text in refused.message)
        raise ServingError(refused.code, refused.message, hint=broken_file_hint(path) or next(hints, "")) from error
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
    return Network(model, _ports(model.inputs, config.input), _ports(model.outputs, config.output), batch)


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
        for sentence in ineffective_parameters(config, plan, known):
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
    dims = {tensor.name: _dims(tensor) for tensor in config.input}
    for port, given in zip(model.inputs, _ports(model.inputs, config.input), strict=True):
        shape = given.shape
        if plan.reshapes and given.name in dims:
            own = shape[:1] if shape else (-1,)
            shape = (*own, *dims[given.name]) if config.max_batch_size > 0 else dims[given.name]
        if config.max_batch_size > 0 and shape:
            size = _batch_size(shape[0], config, plan)
            batch = max(batch, size)
            shape = (size or -1, *shape[1:])
        if shape is not None and shape != given.shape:
            shapes[port] = shape
    return shapes, batch


def _batch_size(own: int, config: ModelConfig, plan: OpenVinoPlan) -> int:
    """Return the size that all batches have, 0 for a variable one.

    Args:
        own: The model's own size, -1 for a variable one.
        config: The configuration of a model that batches.
        plan: Options.
    """
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
        own = next((_dims(tensor) for tensor in configured if tensor.name == port.name), None)
        if own is None:
            raise unsupported(
                f"model '{config.name}': the number of dimensions of {word} '{port.name}' is unknown",
                hint=f"give the {word}s in config.pbtxt",
            )
        shape = (-1, *own) if config.max_batch_size > 0 else own
    if network.batch and shape[:1] == (network.batch,):
        shape = (-1, *shape[1:])
    return SignatureTensor(port.name, datatype, shape)


def _dims(tensor: ModelInput | ModelOutput) -> tuple[int, ...]:
    """Return the dims that the model itself has for a tensor, without the batch."""
    return tensor.dims if tensor.reshape is None else tensor.reshape.shape
