"""The classification extension: an output's largest values with their indices and labels.

Source: KServe v2 classification extension, as Triton answers it.
"""

from collections.abc import Sequence

import numpy as np

from charonia.core.dtypes import DataType
from charonia.core.errors import invalid
from charonia.core.tensor import Tensor

ELEMENTS_MAX = 1_000_000
"""Limit of elements of an output for a classification."""

_FLOATS = (DataType.FP16, DataType.FP32, DataType.FP64, DataType.BF16)
_REFUSED = (DataType.BYTES, DataType.BOOL)


def classify(tensor: Tensor, k: int, labels: Sequence[str], batched: bool) -> Tensor:
    """Return the top `k` of each batch entry as a BYTES tensor of `<value>:<index>[:<label>]`.

    Values descend; equal ones keep the order of their indices, and NaN counts as the smallest. Floating-point values
    have six decimals.

    Args:
        tensor: The model's output.
        k: Number of classes, at least 1; where there are fewer elements, all are returned.
        labels: Label by index; indices beyond it get none, as do empty ones.
        batched: Whether the first dimension is the batch.

    Returns:
        A tensor of the same name, of shape `[batch, min(k, n)]`, or `[min(k, n)]` without batch.

    Raises:
        ServingError: INVALID_ARG for a datatype without an order, or an output that is too large.
    """
    if tensor.datatype in _REFUSED:
        raise invalid(
            f"class result not available for output due to unsupported type '{tensor.datatype.wire}' of '{tensor.name}'"
        )
    if tensor.array.size > ELEMENTS_MAX:
        raise invalid(
            f"classification output tensor too large: '{tensor.name}' has {tensor.array.size} elements, at most "
            f"{ELEMENTS_MAX}"
        )
    rows = tensor.array.shape[0] if batched and tensor.array.ndim else 1
    values = tensor.array.reshape(rows, tensor.array.size // rows if rows else 0)
    if tensor.datatype is DataType.BF16:
        values = (values.astype("<u4") << 16).view("<f4")
    # Sorting the reversed row and reversing the result keeps equal values in the order of their indices; a NaN would
    # sort as the largest.
    order = np.argsort(_sortable(values)[:, ::-1], axis=1, kind="stable")[:, ::-1][:, :k]
    order = values.shape[1] - 1 - order
    is_float = tensor.datatype in _FLOATS
    top = [_entry(values[row, i], int(i), labels, is_float) for row in range(rows) for i in order[row]]
    array = np.empty(len(top), object)
    array[:] = top
    shape = order.shape if batched else order.shape[1:]
    return Tensor(tensor.name, DataType.BYTES, array.reshape(shape))


def _sortable(
    values: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]",
) -> "np.ndarray[tuple[int, ...], np.dtype[np.generic]]":
    if values.dtype.kind != "f":
        return values
    return np.where(np.isnan(values), -np.inf, values)


def _entry(value: np.generic, index: int, labels: Sequence[str], is_float: bool) -> bytes:
    text = f"{float(value):.6f}" if is_float else str(int(value))
    label = labels[index] if index < len(labels) else ""
    return (f"{text}:{index}:{label}" if label else f"{text}:{index}").encode()
