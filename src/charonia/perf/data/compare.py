"""Whether an answer holds what the validation data say."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from charonia.core.dtypes import DataType
from charonia.core.tensor import Array, Tensor
from charonia.perf.data.convert import from_bfloat, is_integer

_EXACT = (DataType.BOOL, DataType.BYTES)


def mismatch(expected: Mapping[str, Tensor], outputs: Mapping[str, Tensor], tolerance: float = 0.0) -> str:
    """Return how outputs differ from what is expected, in one sentence; "" where they do not.

    Strings, integers and booleans are compared exactly. A floating-point number passes when it differs by no more than
    `tolerance * (1 + |expected|)`; NaN only where NaN is expected.

    Args:
        expected: What the answer has to hold; other outputs are not looked at.
        outputs: What it holds.
        tolerance: Of floating-point numbers, absolute and relative.
    """
    for name, want in expected.items():
        got = outputs.get(name)
        if got is None:
            return f"output '{name}': expected in the answer, got none"
        if got.datatype is not want.datatype or got.array.shape != want.array.shape:
            return f"output '{name}': expected {_form(want)}, got {_form(got)}"
        wrong = _wrong(want, got, tolerance)
        if wrong.any():
            first = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
            place = "".join(f"[{int(index)}]" for index in first)
            return (
                f"output '{name}'{place}: expected {_shown(want, first)}, got {_shown(got, first)} "
                f"({int(wrong.sum())} of {wrong.size} elements differ)"
            )
    return ""


def _wrong(want: Tensor, got: Tensor, tolerance: float) -> NDArray[np.bool_]:
    differs: NDArray[np.bool_]
    if want.datatype in _EXACT or is_integer(want.datatype):
        differs = np.asarray(want.array != got.array, bool)
        return differs
    left, right = _floats(want), _floats(got)
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.abs(right - left)
        close = (left == right) | (distance <= tolerance * (1 + np.abs(left)))
    close &= np.isfinite(left) & np.isfinite(right) | (left == right)
    differs = ~(close | (np.isnan(left) & np.isnan(right)))
    return differs


def _floats(tensor: Tensor) -> NDArray[np.float64]:
    array: Array = from_bfloat(tensor.array) if tensor.datatype is DataType.BF16 else tensor.array
    return array.astype(np.float64)


def _form(tensor: Tensor) -> str:
    return f"{tensor.datatype.wire} of shape {list(tensor.array.shape)}"


def _shown(tensor: Tensor, index: tuple[np.intp, ...]) -> str:
    if tensor.datatype is DataType.BYTES:
        return repr(tensor.array[index])[:60]
    array: Array = from_bfloat(tensor.array) if tensor.datatype is DataType.BF16 else tensor.array
    return str(array[index])
