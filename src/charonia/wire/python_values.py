"""Values of Python programs as tensors, for the client and for a server inside the program. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from charonia.core.dtypes import BY_NUMPY, BY_WIRE, DataType
from charonia.core.errors import invalid, not_found
from charonia.core.metadata import ModelMetadata, TensorMetadata
from charonia.core.request import RequestedOutput, check_named
from charonia.core.tensor import Array, Tensor, from_bfloat16, to_bfloat16
from charonia.wire.v2_data import expected_and_got

InputValue = Array | np.generic | Sequence[Any] | bytes | str | bool | int | float
"""An array, whose dtype determines the datatype; a pair of an array and the name of a datatype; a list or a single
element, which use the datatype in the model's metadata."""

Inputs = Mapping[str, InputValue]
Outputs = Sequence[str] | Mapping[str, int]
"""Names of outputs; as a mapping, with the number of top classes to return instead of each, 0 for the tensor."""

_BFLOAT16 = "bfloat16"


def needs_metadata(inputs: Inputs) -> bool:
    """Return whether the datatype of an input must be looked up.

    Raises:
        ServingError: INVALID_ARG for inputs without names.
    """
    check_named(inputs)
    return not all(isinstance(value, np.ndarray | np.generic | tuple) for value in inputs.values())


def make_tensors(model: str, inputs: Inputs, metadata: ModelMetadata | None) -> dict[str, Tensor]:
    """Return the tensors of a request.

    Args:
        model: Model name, for messages.
        inputs: The caller's values.
        metadata: The model's tensors; required if `needs_metadata` says so.

    Raises:
        ServingError: INVALID_ARG for a value that cannot become a tensor, NOT_FOUND for an input that the model does
            not have.
    """
    known = {tensor.name: tensor for tensor in metadata.inputs} if metadata is not None else {}
    tensors: dict[str, Tensor] = {}
    for name, value in inputs.items():
        if isinstance(value, np.ndarray | np.generic):
            tensors[name] = _from_array(name, np.asarray(value))
        elif isinstance(value, tuple):
            tensors[name] = _from_pair(name, value)
        elif name in known:
            tensors[name] = _from_elements(known[name], value)
        else:
            raise not_found(f"model '{model}' has no input '{name}': it has {', '.join(known) or 'none'}")
    return tensors


def make_outputs(outputs: Outputs | None) -> tuple[RequestedOutput, ...]:
    """Return the requested outputs, none for all.

    Raises:
        ServingError: INVALID_ARG for a string in place of a list.
    """
    if outputs is None:
        return ()
    if isinstance(outputs, str):
        raise invalid(f"outputs: expected a list of names, got '{outputs}'", hint=f"write ['{outputs}']")
    if isinstance(outputs, Mapping):
        return tuple(RequestedOutput(name, classes) for name, classes in outputs.items())
    return tuple(RequestedOutput(name) for name in outputs)


def _from_array(name: str, array: Array) -> Tensor:
    if array.dtype.name == _BFLOAT16:
        return Tensor(name, DataType.BF16, array.view(np.uint16))
    if array.dtype.kind in "OSUT":
        return Tensor(name, DataType.BYTES, _bytes_elements(name, array))
    datatype = BY_NUMPY.get(array.dtype.newbyteorder("<"))
    if datatype is None:
        raise invalid(f"input '{name}': no datatype of the protocol matches numpy dtype {array.dtype}")
    return Tensor(name, datatype, array.astype(datatype.numpy, order="C", copy=False))


def _from_pair(name: str, pair: tuple[Any, ...]) -> Tensor:
    datatype = BY_WIRE.get(pair[1]) if len(pair) == 2 and isinstance(pair[1], str) else None
    if datatype is None:
        raise invalid(f"input '{name}': expected a pair of an array and a datatype such as \"BF16\", got {pair!r:.80}")
    if isinstance(pair[0], np.ndarray):
        tensor = _from_array(name, pair[0])
        if tensor.datatype is datatype:
            return tensor
        if datatype is DataType.BF16 and tensor.datatype is DataType.UINT16:
            return Tensor(name, datatype, tensor.array)
        if datatype is not DataType.BF16 or tensor.array.dtype.kind != "f":
            raise invalid(f"input '{name}': expected an array for {datatype.wire}, got one of {tensor.datatype.wire}")
    return _from_elements(TensorMetadata(name, datatype, (1,)), pair[0])


def _from_elements(metadata: TensorMetadata, value: Any) -> Tensor:
    """Return a list or one element as a tensor of the model's datatype; one element takes the model's rank."""
    name, datatype = metadata.name, metadata.datatype
    if isinstance(value, bytes | str | bool | int | float):
        value = np.array(value, object if isinstance(value, bytes | str) else None).reshape((1,) * len(metadata.shape))
    try:
        if datatype is DataType.BYTES:
            return Tensor(name, datatype, _bytes_elements(name, _object_array(value)))
        array = _of_datatype(datatype, value)
    except ValueError as error:
        raise invalid(f"input '{name}': the lists differ in length: {error}") from error
    if array is None:
        elements = [np.asarray(element).tolist() for element in np.array(value, object).ravel()]
        first = next(index for index, element in enumerate(elements) if _of_datatype(datatype, element) is None)
        raise invalid(f"input '{name}': {expected_and_got(datatype, elements, first)}")
    return Tensor(name, datatype, array)


def _of_datatype(datatype: DataType, value: Any) -> Array | None:
    """Return lists of numbers or booleans as an array of a datatype, None where an element is not of it."""
    array: Array = np.asarray(value)
    wanted = "f" if datatype is DataType.BF16 else datatype.numpy.kind
    if array.size and wanted in "iu":
        if array.dtype.kind in "fO":  # the dtype of integers that no integer dtype can hold together
            array = np.array(value, object)
            if not all(type(element) is int for element in array.ravel().tolist()):
                return None
        elif array.dtype.kind not in "iu":
            return None
        limits = np.iinfo(datatype.numpy.name)
        if int(array.min()) < limits.min or int(array.max()) > limits.max:
            return None
    elif array.size and array.dtype.kind not in ("b" if wanted == "b" else "iuf"):
        return None
    return to_bfloat16(array.astype(np.float32)) if datatype is DataType.BF16 else array.astype(datatype.numpy)


def _object_array(value: Any) -> Array:
    """Return nested lists of strings as an array: numpy's own string arrays would lose trailing zero bytes."""
    return value if isinstance(value, np.ndarray) else np.array(value, object)


def _bytes_elements(name: str, array: Array) -> Array:
    elements = np.empty(array.size, object)
    for index, element in enumerate(array.ravel().tolist()):
        if isinstance(element, str):
            element = element.encode()
        elif not isinstance(element, bytes):
            raise invalid(f"input '{name}': BYTES elements are str or bytes, got {type(element).__name__}")
        elements[index] = element
    return elements.reshape(array.shape)


def readable(tensor: Tensor) -> Array:
    """Return the array of an output; BF16 is float32, which numpy has."""
    return from_bfloat16(tensor.array) if tensor.datatype is DataType.BF16 else tensor.array
