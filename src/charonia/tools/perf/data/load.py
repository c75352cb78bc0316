"""Loads or generates the input data of a run, and batches it: the run's `InputSource`.

Generated items are valid random ones, or zeros. Without a range, floating-point numbers are in [0, 1), integers from 0
to 127 (valid ids in almost any vocabulary), UINT8 from 0 to 255 (pixels), booleans 0 or 1, and strings have letters and
digits.
"""

from collections.abc import Mapping, Sequence
from math import lcm
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from charonia.core.dtypes import DataType
from charonia.core.errors import invalid
from charonia.core.request import InferRequest, ParameterValue
from charonia.core.tensor import Array, Tensor, to_bfloat16
from charonia.tools.perf.data.files import read_path
from charonia.tools.perf.data.spec import (
    InputStep,
    Item,
    ModelSpec,
    Stream,
    TensorSpec,
    check_batch_size,
    integer_limits,
    is_integer,
    names,
    with_shapes,
)
from charonia.tools.perf.options import DataOptions, PerfOptions

INTEGER_DEFAULT_MAX = 127
_USUAL = DataOptions()
_LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789", np.uint8)


class Generator:
    """Generates items for a model.

    Raises:
        ServingError: INVALID_ARG for a range of an unknown input, or outside its datatype.
    """

    def __init__(self, spec: ModelSpec, options: DataOptions = _USUAL, seed: int = 0) -> None:
        self._spec = spec
        self._random = np.random.default_rng(seed)
        self._string_length = options.string_length
        self._string_data = options.string_data.encode(errors="surrogateescape")
        self._ranges = {name: (low, high) for name, low, high in options.ranges}
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
            made = to_bfloat16(values) if datatype is DataType.BF16 else values.astype(datatype.numpy)
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


class InputBatches:
    """Batches of steps. Request `k` of a stream has the steps `k * b` to `k * b + b - 1`, modulo their number.

    A stream of `n` steps has n / gcd(n, b) requests, after which they repeat.

    Args:
        streams: The steps, at least one in each stream.
        batch_size: Items in a request; 1 for a model without batch dimension.

    Raises:
        ServingError: INVALID_ARG if steps of a batch have different inputs or shapes.
    """

    def __init__(
        self,
        spec: ModelSpec,
        streams: Sequence[Stream],
        batch_size: int = 1,
        parameters: Mapping[str, ParameterValue] | None = None,
    ) -> None:
        self.batch_size = batch_size
        self.stream_count = len(streams)
        self._spec = spec
        self._streams = [list(stream) for stream in streams]
        self._datatypes = {tensor.name: tensor.datatype for tensor in spec.outputs}
        self._parameters = dict(parameters or {})
        for number in range(self.stream_count):
            for index in range(self.step_count(number)):
                _check_together(self._batch(number, index))

    def step_count(self, stream: int) -> int:
        """Return the number of requests of a stream."""
        count = len(self._streams[stream])
        return lcm(count, self.batch_size) // self.batch_size

    def request(self, stream: int, step: int) -> InferRequest:
        """Return a request of a stream."""
        steps = self._batch(stream, step)
        inputs = {
            tensor.name: Tensor(tensor.name, tensor.datatype, self._joined([s.inputs[tensor.name] for s in steps]))
            for tensor in self._spec.inputs
            if tensor.name in steps[0].inputs
        }
        return InferRequest(
            self._spec.name, inputs, model_version=self._spec.version, parameters=dict(self._parameters)
        )

    def expected(self, stream: int, step: int) -> Mapping[str, Tensor] | None:
        """Return the expected outputs of a request, None without validation data."""
        wanted = [s.expected for s in self._batch(stream, step)]
        if wanted[0] is None:
            return None
        return {
            name: Tensor(name, self._datatypes[name], self._joined([item[name] for item in wanted if item]))
            for name in wanted[0]
        }

    def _batch(self, stream: int, step: int) -> list[InputStep]:
        steps = self._streams[stream]
        first = step * self.batch_size
        return [steps[index % len(steps)] for index in range(first, first + self.batch_size)]

    def _joined(self, items: list[Array]) -> Array:
        if not self._spec.max_batch_size:
            return items[0]
        return np.stack(items)


def _check_together(steps: Sequence[InputStep]) -> None:
    first = steps[0]
    for other in steps[1:]:
        for kind, mine, theirs in (
            ("input", first.inputs, other.inputs),
            ("output", first.expected or {}, other.expected or {}),
        ):
            if mine.keys() != theirs.keys():
                name = sorted(mine.keys() ^ theirs.keys())[0]
                raise invalid(f"{other.where}: {kind} '{name}': expected in all steps of a batch or in none")
            for name, array in mine.items():
                if array.shape != theirs[name].shape:
                    raise invalid(
                        f"{other.where}: {kind} '{name}': expected shape {list(array.shape)}, that of the step before "
                        f"it in the batch, got {list(theirs[name].shape)}"
                    )


def load_inputs(spec: ModelSpec, options: PerfOptions) -> InputBatches:
    """Return the requests that the options describe.

    Raises:
        ServingError: INVALID_ARG if the data cannot be read or does not fit the model.
    """
    batch_size = options.target.batch_size
    check_batch_size(spec, batch_size)
    spec = with_shapes(spec, options.data.shapes)
    if options.data.is_from_files:
        streams = [stream for source in options.data.sources for stream in read_path(Path(source), spec)]
    else:
        streams = [_generate(spec, options.data.sources[0], options.data, options.load.seed, batch_size)]
    return InputBatches(spec, streams, batch_size, dict(options.target.parameters))


def _generate(spec: ModelSpec, kind: str, options: DataOptions, seed: int, count: int) -> Stream:
    if not spec.inputs:
        raise invalid(f"model '{spec.name}': expected inputs, got {names(spec.inputs)}")
    generator = Generator(spec, options, seed)
    if kind == "zero":
        return [InputStep(generator.zero())]
    # The items of a batch are different.
    return [InputStep(generator.random()) for _ in range(count)]
