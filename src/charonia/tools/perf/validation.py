"""Compares responses with validation data."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError
from charonia.core.response import InferResponse
from charonia.core.tensor import Tensor
from charonia.tools.perf.api import InputSource, MeasuredTarget
from charonia.tools.perf.data.spec import is_integer
from charonia.tools.perf.sequences import Part
from charonia.wire import grpc_codec, http_codec
from charonia.wire.answer import Answer
from charonia.wire.python_values import readable

_EXACT = (DataType.BOOL, DataType.BYTES)


def mismatch(expected: Mapping[str, Tensor], outputs: Mapping[str, Tensor], tolerance: float = 0.0) -> str:
    """Return the first difference from the expected outputs, in one sentence; "" for none.

    Strings, integers and booleans must be equal. A floating-point number may differ by up to
    `tolerance * (1 + |expected|)`; NaN equals only NaN.

    Args:
        expected: Expected outputs; other outputs are ignored.
        tolerance: Absolute and relative tolerance of floating-point numbers.
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
    return readable(tensor).astype(np.float64)


def _form(tensor: Tensor) -> str:
    return f"{tensor.datatype.wire} of shape {list(tensor.array.shape)}"


def _shown(tensor: Tensor, index: tuple[np.intp, ...]) -> str:
    if tensor.datatype is DataType.BYTES:
        return repr(tensor.array[index])[:60]
    return str(readable(tensor)[index])


class Validator:
    """Compares responses with the expected outputs of a data source.

    Args:
        tolerance: Absolute and relative tolerance of floating-point numbers.
    """

    def __init__(self, source: InputSource, target: MeasuredTarget, tolerance: float) -> None:
        self._source = source
        self._target = target
        self._tolerance = tolerance

    def problem(self, part: Part, answer: Answer) -> str:
        """Return the problem of the response to a request, in one sentence; "" for none."""
        expected = self._source.expected(part.stream, part.step)
        if expected is None:
            return ""
        try:
            response = self._decoded(answer)
        except ServingError as error:
            return error.message
        return mismatch(expected, {tensor.name: tensor for tensor in response.outputs}, self._tolerance)

    def _decoded(self, answer: Answer) -> InferResponse:
        if self._target.protocol == "http":
            return http_codec.decode_response(answer.body, answer.json_bytes)
        if not self._target.streaming:
            return grpc_codec.decode_response(answer.body)
        response = grpc_codec.decode_stream_response(answer.body)
        if isinstance(response, ServingError):
            raise response
        return response
