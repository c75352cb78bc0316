"""The tensors of a model, without the batch dimension, and the steps and streams that match them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from charonia.core.dtypes import DataType
from charonia.core.errors import invalid
from charonia.core.metadata import ModelMetadata, TensorMetadata
from charonia.core.tensor import Array

Item = dict[str, Array]
"""Arrays by tensor name, without the batch dimension."""

FILE_BYTES_MAX = 4 * 2**30
"""Largest file of input data."""


@dataclass(frozen=True, slots=True)
class InputStep:
    """An item to send.

    Attributes:
        expected: Expected outputs, None without validation data.
        where: Its place in a file, for messages, e.g. `data.json: step 3`.
    """

    inputs: Item
    expected: Mapping[str, Array] | None = None
    where: str = ""


Stream = list[InputStep]
"""Steps in the order in which they are sent."""


Shape = tuple[int, ...]

LAYOUTS = {"FORMAT_NHWC": "HWC", "FORMAT_NCHW": "CHW"}
"""Order of a picture's dimensions by `format` in a model's configuration."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of a model.

    Attributes:
        name: Tensor name.
        datatype: Protocol datatype.
        shape: Shape of one item, without the batch dimension; -1 for a variable dimension that `--shape` does not set.
        optional: Whether a request may omit it.
        layout: "HWC" or "CHW" if the model's configuration declares a picture, else "".
        declared: The model's own shape if `--shape` has replaced it, else None.
    """

    name: str
    datatype: DataType
    shape: Shape
    optional: bool = False
    layout: str = ""
    declared: Shape | None = None

    @property
    def is_fixed(self) -> bool:
        return -1 not in self.shape

    def fits(self, shape: Shape) -> bool:
        """Return whether an item may have this shape."""
        declared = self.shape if self.declared is None else self.declared
        return len(shape) == len(declared) and all(want in (-1, got) for want, got in zip(declared, shape, strict=True))

    def __str__(self) -> str:
        return f"{self.datatype.wire} of shape {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The form of requests to a model.

    Attributes:
        name: Model name.
        version: Version to request, "" for the server's choice.
        max_batch_size: Limit of items in a request; 0 for a model without batch dimension.
    """

    name: str
    version: str
    max_batch_size: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...] = field(default=())

    def input(self, name: str) -> TensorSpec | None:
        return next((spec for spec in self.inputs if spec.name == name), None)

    def output(self, name: str) -> TensorSpec | None:
        return next((spec for spec in self.outputs if spec.name == name), None)


def model_spec(metadata: ModelMetadata, config: Mapping[str, Any], version: str = "") -> ModelSpec:
    """Return the form of requests to a model.

    Args:
        metadata: The server's metadata of the model, shapes with the batch dimension.
        config: The server's configuration of the model as JSON, {} if the server does not provide it.
        version: Version to request.
    """
    max_batch_size = int(config.get("max_batch_size", 0))
    configured = {entry.get("name"): entry for entry in config.get("input", ())}
    inputs = []
    for tensor in metadata.inputs:
        entry = configured.get(tensor.name, {})
        layout = LAYOUTS.get(entry.get("format", ""), "")
        is_optional = bool(entry.get("optional", False))
        inputs.append(replace(_tensor(tensor, max_batch_size), optional=is_optional, layout=layout))
    outputs = tuple(_tensor(tensor, max_batch_size) for tensor in metadata.outputs)
    return ModelSpec(metadata.name, version, max_batch_size, tuple(inputs), outputs)


def with_shapes(spec: ModelSpec, shapes: Iterable[tuple[str, Shape]]) -> ModelSpec:
    """Return the model with the variable dimensions of its inputs filled in.

    Args:
        spec: The model.
        shapes: Shape by input; an input of fixed shape keeps its own.

    Raises:
        ServingError: INVALID_ARG for an unknown input, or a shape that does not fit it.
    """
    wanted = dict(shapes)
    for name, shape in wanted.items():
        tensor = spec.input(name)
        if tensor is None:
            raise invalid(f"--shape: expected an input of model '{spec.name}', {names(spec.inputs)}, got '{name}'")
        if not tensor.fits(shape):
            raise invalid(
                f"--shape: input '{name}': expected a shape that fits {list(tensor.shape)}, got {list(shape)}"
            )
    inputs = [
        replace(tensor, shape=wanted[tensor.name], declared=tensor.shape) if tensor.name in wanted else tensor
        for tensor in spec.inputs
    ]
    return replace(spec, inputs=tuple(inputs))


def check_batch_size(spec: ModelSpec, batch_size: int) -> None:
    """Check that the model accepts this number of items in a request.

    Raises:
        ServingError: INVALID_ARG if it does not.
    """
    if spec.max_batch_size == 0 and batch_size > 1:
        raise invalid(f"-b: expected 1, as model '{spec.name}' does not support batching, got {batch_size}")
    if spec.max_batch_size and batch_size > spec.max_batch_size:
        raise invalid(
            f"-b: expected at most {spec.max_batch_size}, the max_batch_size of model '{spec.name}', got {batch_size}"
        )


def names(tensors: Iterable[TensorSpec]) -> str:
    return ", ".join(f"'{tensor.name}'" for tensor in tensors) or "none"


def _tensor(tensor: TensorMetadata, max_batch_size: int) -> TensorSpec:
    shape = tensor.shape[1:] if max_batch_size else tensor.shape
    return TensorSpec(tensor.name, tensor.datatype, shape)
