"""Generated items: valid random ones, and zeros.

Without a range, floating-point numbers are in [0, 1), integers from 0 to 127 (valid ids in almost any vocabulary),
UINT8 from 0 to 255 (pixels), booleans 0 or 1, and strings have letters and digits.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from charonia.core.dtypes import DataType
from charonia.core.errors import invalid
from charonia.core.tensor import Array
from charonia.tools.perf.data.convert import integer_limits, is_integer, to_bfloat
from charonia.tools.perf.data.spec import Item, ModelSpec, TensorSpec, names

INTEGER_DEFAULT_MAX = 127
_LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789", np.uint8)


class Generator:
    """Generates items for a model.

    Args:
        spec: The model, with all shapes known.
        seed: Random seed.
        string_length: Characters of a string.
        string_data: Text of all strings, "" for random ones.
        ranges: Lowest and highest value by input.

    Raises:
        ServingError: INVALID_ARG for a range of an unknown input, or outside its datatype.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        seed: int = 0,
        string_length: int = 128,
        string_data: str = "",
        ranges: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        self._spec = spec
        self._random = np.random.default_rng(seed)
        self._string_length = string_length
        self._string_data = string_data.encode(errors="surrogateescape")
        self._ranges = dict(ranges or {})
        for name, (low, high) in self._ranges.items():
            _check_range(spec, name, low, high)

    def random(self) -> Item:
        return {tensor.name: self._random_array(tensor) for tensor in self._generated()}

    def zero(self) -> Item:
        """Return an item of zeros; strings are empty, or `string_data`."""
        return {tensor.name: self._zero_array(tensor) for tensor in self._generated()}

    def _generated(self) -> list[TensorSpec]:
        tensors = [tensor for tensor in self._spec.inputs if not tensor.optional or tensor.name in self._ranges]
        for tensor in tensors:
            if not tensor.is_fixed:
                raise invalid(
                    f"input '{tensor.name}' of model '{self._spec.name}': expected fixed dimensions, "
                    f"got {list(tensor.shape)}",
                    hint=f"--shape {tensor.name}:D1,D2,... says which to send",
                )
        return tensors

    def _random_array(self, tensor: TensorSpec) -> Array:
        datatype, shape, random = tensor.datatype, tensor.shape, self._random
        made: Array
        if datatype is DataType.BYTES:
            return self._strings(shape)
        if datatype is DataType.BOOL:
            made = random.integers(0, 2, shape).astype(np.bool_)
        elif datatype.numpy.kind == "f" or datatype is DataType.BF16:
            low, high = self._ranges.get(tensor.name, (0.0, 1.0))
            values: NDArray[np.float64] = low + (high - low) * random.random(shape)
            made = to_bfloat(values.astype(np.float32)) if datatype is DataType.BF16 else values.astype(datatype.numpy)
        else:
            default_max = 255 if datatype is DataType.UINT8 else INTEGER_DEFAULT_MAX
            low, high = self._ranges.get(tensor.name, (0, default_max))
            made = random.integers(int(low), int(high), shape, datatype.numpy.newbyteorder("="), endpoint=True)
        return made

    def _zero_array(self, tensor: TensorSpec) -> Array:
        made: Array = np.zeros(tensor.shape, tensor.datatype.numpy)
        if tensor.datatype is DataType.BYTES:
            made.fill(self._string_data)
        return made

    def _strings(self, shape: tuple[int, ...]) -> Array:
        made: Array = np.empty(shape, object)
        if self._string_data:
            made.fill(self._string_data)
            return made
        letters = self._random.choice(_LETTERS, (made.size, self._string_length))
        flat = np.empty(made.size, object)
        flat[:] = [row.tobytes() for row in letters]
        return flat.reshape(shape)


def _check_range(spec: ModelSpec, name: str, low: float, high: float) -> None:
    tensor = spec.input(name)
    if tensor is None:
        raise invalid(f"--input-range: expected an input of model '{spec.name}', {names(spec.inputs)}, got '{name}'")
    datatype = tensor.datatype
    if datatype in (DataType.BYTES, DataType.BOOL):
        raise invalid(f"--input-range: input '{name}': expected an input of numbers, got one of {datatype.wire}")
    if is_integer(datatype):
        least, most = integer_limits(datatype)
        if low != int(low) or high != int(high):
            raise invalid(f"--input-range: input '{name}': expected integers for {datatype.wire}, got {low:g}:{high:g}")
        if low < least or high > most:
            raise invalid(
                f"--input-range: input '{name}': expected values that fit {datatype.wire}, got {low:g}:{high:g}"
            )
    elif datatype.numpy.kind == "f":
        with np.errstate(over="ignore"):
            ends = np.array([low, high]).astype(datatype.numpy)
        if not np.isfinite(ends.astype(np.float64)).all():
            raise invalid(
                f"--input-range: input '{name}': expected values that fit {datatype.wire}, got {low:g}:{high:g}"
            )
