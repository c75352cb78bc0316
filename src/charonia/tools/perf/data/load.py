"""Loads the input data of a run (JSON, .npy files, pictures, folders) or generates it, and batches it: `InputSource`.

Generated items are valid random ones, or zeros. Without a range, floating-point numbers are in [0, 1), integers from 0
to 127 (valid ids in almost any vocabulary), UINT8 from 0 to 255 (pixels), booleans 0 or 1, and strings have letters and
digits.

A JSON file is `{"data": [...], "validation_data": [...]}`. `data` is a list of steps, or a list of streams, which are
lists of steps. A step is an object of inputs by name. An input is a list (flat or nested), a single value,
`{"b64": TEXT}`, or `{"content": ...}` with either of these as content. The two objects accept a `"shape": [...]`,
without the batch dimension.

A folder has a file for each input, with the input's name: raw row-major elements, text with an element per line for
strings, or an .npy file or picture with its suffix. Files with the names of outputs hold the expected outputs. For a
model with one input, the folder may hold pictures of any name instead: each is a step, in the order of names.

A picture is sent encoded, to an input of strings or of UINT8 with one dimension: the model decodes it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from math import lcm
from pathlib import Path

import numpy as np
import orjson
from numpy.typing import NDArray

from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, invalid
from charonia.core.request import InferRequest, ParameterValue
from charonia.core.tensor import Array, Tensor, to_bfloat16
from charonia.tools.perf.data.spec import (
    FILE_BYTES_MAX,
    InputStep,
    Item,
    ModelSpec,
    Stream,
    TensorSpec,
    check_batch_size,
    from_base64,
    from_list,
    from_raw,
    integer_limits,
    is_integer,
    names,
    to_datatype,
    with_shapes,
)
from charonia.tools.perf.options import DataOptions, PerfOptions
from charonia.wire.tensors import bytes_array

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


SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff"})


def is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES


def read_image(path: Path, spec: TensorSpec) -> Array:
    """Return a picture, which the model decodes, as an item of an input.

    Raises:
        ServingError: INVALID_ARG if the input does not take a file.
    """
    content = path.read_bytes()
    if spec.datatype is DataType.UINT8 and len(spec.shape) == 1:
        shape: tuple[int, ...] = (len(content),)
        made: Array = np.frombuffer(content, np.uint8)
    else:
        shape = tuple(1 if size == -1 else size for size in spec.shape)
        is_one = spec.datatype is DataType.BYTES and np.prod(shape) == 1
        made = bytes_array(spec.name, shape, [content]) if is_one else np.empty(0, object)
    if not spec.fits(shape) or made.size != np.prod(shape):
        raise invalid(
            f"{path.name}: input '{spec.name}': expected an input that takes one file, got one of {spec}",
            hint="save the pixels as .npy",
        )
    return made


def read_path(path: Path, spec: ModelSpec) -> list[Stream]:
    """Return the streams of a file or folder.

    Raises:
        ServingError: INVALID_ARG with file, step and tensor of the first problem.
    """
    try:
        if path.is_dir():
            return [_read_folder(path, spec)]
        if path.suffix.lower() == ".npy" or is_image(path):
            return [_steps({_only_input(path, spec).name: _items(path, _only_input(path, spec))}, {}, path.name)]
    except OSError as error:
        raise invalid(f"{path}: cannot be read: {error.strerror}") from None
    return read_json(path, spec)


def _read_folder(folder: Path, spec: ModelSpec) -> Stream:
    files = sorted(file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))
    if not files:
        raise invalid(f"{folder}: expected a file for each input, {names(spec.inputs)}, got an empty folder")
    by_tensor: dict[str, Path] = {}
    unknown = []
    for file in files:
        name = file.name if _tensor(spec, file.name) else file.stem
        if _tensor(spec, name) is None:
            unknown.append(file)
        elif name in by_tensor:
            raise invalid(f"{folder}: '{name}': expected one file, got {by_tensor[name].name} and {file.name}")
        else:
            by_tensor[name] = file
    if len(unknown) == len(files) and len(spec.inputs) == 1 and all(map(is_image, files)):
        images = [read_image(file, spec.inputs[0]) for file in files]
        return [
            InputStep({spec.inputs[0].name: image}, None, file.name) for file, image in zip(files, images, strict=True)
        ]
    if unknown:
        raise invalid(
            f"{folder}: expected files named as inputs, {names(spec.inputs)}, or outputs, {names(spec.outputs)}, "
            f"got {unknown[0].name}"
        )
    missing = [tensor for tensor in spec.inputs if tensor.name not in by_tensor and not tensor.optional]
    if missing:
        raise invalid(f"{folder}: expected a file for input {names(missing)}, got none")
    inputs = {t.name: _items(by_tensor[t.name], t) for t in spec.inputs if t.name in by_tensor}
    outputs = {t.name: _items(by_tensor[t.name], t) for t in spec.outputs if t.name in by_tensor}
    return _steps(inputs, outputs, folder.name)


def _tensor(spec: ModelSpec, name: str) -> TensorSpec | None:
    return spec.input(name) or spec.output(name)


def _only_input(path: Path, spec: ModelSpec) -> TensorSpec:
    if len(spec.inputs) != 1:
        raise invalid(
            f"{path.name}: expected a model with one input, got {names(spec.inputs)}",
            hint="put a file for each input into a folder",
        )
    return spec.inputs[0]


def _items(path: Path, spec: TensorSpec) -> list[Array]:
    size = path.stat().st_size
    if size > FILE_BYTES_MAX:
        raise invalid(f"{path.name}: expected at most {FILE_BYTES_MAX} bytes, got {size}")
    try:
        if path.suffix.lower() == ".npy":
            return _read_npy(path, spec)
        if is_image(path):
            return [read_image(path, spec)]
        if spec.datatype is DataType.BYTES:
            return [from_list(spec, path.read_bytes().splitlines(), None)]
        return [from_raw(spec, path.read_bytes())]
    except ServingError as error:
        if error.message.startswith(path.name):
            raise
        raise invalid(f"{path.name}: '{spec.name}': {error.message}", hint=error.hint) from None


def _read_npy(path: Path, spec: TensorSpec) -> list[Array]:
    """Return the items of an array: one item, or several along an additional first dimension."""
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise invalid(f"expected an array in the format of .npy, got: {error}") from None
    if spec.datatype is DataType.BYTES and array.dtype.kind in "US":
        array = np.array([_bytes(text) for text in array.flat] or [b""], object)[: array.size].reshape(array.shape)
    elif spec.datatype is DataType.BYTES:
        raise invalid(f"expected strings for {spec}, got {array.dtype}")
    elif not (spec.datatype is DataType.BF16 and array.dtype == np.uint16):  # BF16 as its bit patterns
        array = to_datatype(spec, array)
    if spec.fits(array.shape):
        return [array]
    if array.ndim == len(spec.shape) + 1 and len(array) and spec.fits(array.shape[1:]):
        return list(array)
    raise invalid(f"expected {spec}, or several of these, got shape {list(array.shape)}")


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else bytes(text)


def _steps(inputs: dict[str, list[Array]], outputs: dict[str, list[Array]], where: str) -> Stream:
    """Return the steps of arrays by name; a tensor with a single item is repeated in every step."""
    tensors = inputs | outputs
    count = max(map(len, tensors.values()))
    for name, items in tensors.items():
        if len(items) not in (1, count):
            longest = next(other for other, others in tensors.items() if len(others) == count)
            raise invalid(f"{where}: '{name}': expected {count} items, as many as '{longest}', got {len(items)}")
    return [
        InputStep(
            {name: items[index % len(items)] for name, items in inputs.items()},
            {name: items[index % len(items)] for name, items in outputs.items()} or None,
            f"{where}: step {index}",
        )
        for index in range(count)
    ]


MODEL_KEY = "model"
"""Key of a step that names a model and is ignored."""

_DOCUMENT_KEYS = frozenset({"data", "validation_data"})


def read_json(path: Path, spec: ModelSpec) -> list[Stream]:
    """Return the streams of a JSON file.

    Raises:
        ServingError: INVALID_ARG with file, step and tensor of the first problem.
    """
    where = path.name
    document = _parse(path)
    if not isinstance(document, dict) or not isinstance(document.get("data"), list):
        raise invalid(f"""{where}: expected an object with a list named "data", got none""")
    unknown = sorted(document.keys() - _DOCUMENT_KEYS)
    if unknown:
        raise invalid(f"{where}: expected data and validation_data only, got '{unknown[0]}'")
    streams = _streams(document["data"], where, "data", lambda step, place: _json_inputs(spec, step, place))
    if "validation_data" not in document:
        return [[InputStep(item, None, place) for place, item in stream] for stream in streams]
    expected = _streams(
        document["validation_data"], where, "validation_data", lambda step, place: _json_outputs(spec, step, place)
    )
    if [len(stream) for stream in streams] != [len(stream) for stream in expected]:
        raise invalid(
            f"{where}: expected validation_data with as many streams and steps as data, {_lengths(streams)}, "
            f"got {_lengths(expected)}"
        )
    return [
        [InputStep(item, outputs, place) for (place, item), (_, outputs) in zip(stream, wanted, strict=True)]
        for stream, wanted in zip(streams, expected, strict=True)
    ]


def _parse(path: Path) -> object:
    try:
        size = path.stat().st_size
        if size > FILE_BYTES_MAX:
            raise invalid(f"{path}: expected at most {FILE_BYTES_MAX} bytes, got {size}")
        text = path.read_bytes()
    except OSError as error:
        raise invalid(f"{path}: cannot be read: {error.strerror}") from None
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        pass  # NaN and Infinity are not JSON, and the other parser reports the position of a mistake
    try:
        document: object = json.loads(text)
    except UnicodeDecodeError as error:
        raise invalid(f"{path.name}: expected JSON in UTF-8, got: {error.reason}") from None
    except json.JSONDecodeError as error:
        raise invalid(f"{path.name}: line {error.lineno}: expected JSON, got: {error.msg}") from None
    except ValueError:  # Python reads no longer ones
        raise invalid(f"{path.name}: expected JSON, got an integer of thousands of digits") from None
    except RecursionError:
        raise invalid(f"{path.name}: expected JSON, got lists that are nested too deeply") from None
    return document


def _streams(
    data: object, where: str, key: str, read: Callable[[Mapping[str, object], str], Item]
) -> list[list[tuple[str, Item]]]:
    """Return the items of each stream with their places in the file."""
    if not isinstance(data, list) or not data:
        raise invalid(f"{where}: {key}: expected a list of steps, got {'an empty one' if data == [] else 'none'}")
    kinds = {type(entry) for entry in data}
    if kinds not in ({dict}, {list}):
        raise invalid(f"{where}: {key}: expected objects (steps) only or lists (streams) only, got a mixture")
    streams = [data] if kinds == {dict} else data
    made = []
    for number, stream in enumerate(streams):
        place = where if kinds == {dict} else f"{where}: stream {number}"
        if not stream:
            raise invalid(f"{place}: expected at least one step, got none")
        made.append([_read(f"{place}: step {index}", step, read) for index, step in enumerate(stream)])
    return made


def _read(place: str, step: object, read: Callable[[Mapping[str, object], str], Item]) -> tuple[str, Item]:
    if not isinstance(step, dict):
        raise invalid(f"{place}: expected an object with a tensor by name, got something else")
    return place, read(step, place)


def _json_inputs(spec: ModelSpec, step: Mapping[str, object], place: str) -> Item:
    for name in step:
        if spec.input(name) is None and name != MODEL_KEY:
            raise invalid(f"{place}: expected inputs of model '{spec.name}', {names(spec.inputs)}, got '{name}'")
    missing = [tensor for tensor in spec.inputs if tensor.name not in step and not tensor.optional]
    if missing:
        raise invalid(f"{place}: expected input {names(missing)}, got none")
    return {
        tensor.name: _json_tensor(tensor, step[tensor.name], f"{place}: input '{tensor.name}'")
        for tensor in spec.inputs
        if tensor.name in step
    }


def _json_outputs(spec: ModelSpec, step: Mapping[str, object], place: str) -> Item:
    made = {}
    for name, value in step.items():
        tensor = spec.output(name)
        if tensor is None:
            raise invalid(f"{place}: expected outputs of model '{spec.name}', {names(spec.outputs)}, got '{name}'")
        made[name] = _json_tensor(tensor, value, f"{place}: output '{name}'")
    return made


def _json_tensor(spec: TensorSpec, value: object, place: str) -> Array:
    try:
        return _array(spec, value)
    except ServingError as error:
        raise invalid(f"{place}: {error.message}", hint=error.hint) from None


def _array(spec: TensorSpec, value: object) -> Array:
    if not isinstance(value, dict):
        return from_list(spec, value, None)
    if "content" in value and "b64" in value:
        raise invalid("expected content or b64, got both")
    content = value if "b64" in value else value.get("content")
    unknown = sorted(value.keys() - {"content", "b64", "shape"})
    if content is None or unknown:
        got = f"'{unknown[0]}'" if unknown else "no content"
        raise invalid(f'expected a list, {{"b64": ...}} or {{"content": ...}}, both with an optional shape, got {got}')
    shape = _shape(value["shape"]) if "shape" in value else None
    if not isinstance(content, dict):
        return from_list(spec, content, shape)
    if content is not value and content.keys() != {"b64"}:
        raise invalid(f"expected a list or b64 as content, got an object with {sorted(content)}")
    return from_base64(spec, content["b64"], shape)


def _shape(value: object) -> tuple[int, ...]:
    if isinstance(value, list) and all(type(size) is int and size >= 0 for size in value):
        return tuple(value)
    raise invalid(f"expected a shape of integers of at least 0, got {json.dumps(value)[:60]}")


def _lengths(streams: list[list[tuple[str, Item]]]) -> str:
    return f"{len(streams)} streams of {', '.join(str(len(stream)) for stream in streams)} steps"
