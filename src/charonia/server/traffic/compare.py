"""Whether two answers to the same request say the same. Pure."""

from collections.abc import Sequence

import numpy as np

from charonia.core.dtypes import DataType
from charonia.core.tensor import Array, Tensor
from charonia.wire.traffic import Shadow


def differs(given: Sequence[Tensor], copied: Sequence[Tensor], shadow: Shadow) -> bool:
    """Return whether the outputs of a copy differ from those that were given.

    Outputs are compared by name, with datatype and shape. Floating-point numbers may differ by the tolerances; NaN
    equals NaN. Everything else must be equal.
    """
    others = {tensor.name: tensor for tensor in copied}
    return others.keys() != {tensor.name for tensor in given} or any(
        _differ(tensor, others[tensor.name], shadow) for tensor in given
    )


def _differ(one: Tensor, other: Tensor, shadow: Shadow) -> bool:
    if one.datatype is not other.datatype or one.shape != other.shape:
        return True
    a, b = _numbers(one), _numbers(other)
    if a.dtype.kind != "f":
        return not np.array_equal(a, b)
    return not np.allclose(b, a, rtol=shadow.relative_tolerance, atol=shadow.absolute_tolerance, equal_nan=True)


def _numbers(tensor: Tensor) -> Array:
    if tensor.datatype is DataType.BF16:
        return (tensor.array.astype(np.uint32) << 16).view(np.float32)
    return tensor.array
