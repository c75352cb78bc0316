"""Input data from .npy files, pictures and folders.

In a folder there is a file an input, named as the input: raw row-major elements, for strings a text with an element a
line, or with the suffix of .npy or of a picture. Files named as outputs hold what is expected. For a model with a
single input the folder may also hold pictures of any name: each is a step, in the order of names.
"""

from pathlib import Path

import numpy as np

from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, invalid
from charonia.core.tensor import Array
from charonia.perf.data.convert import from_list, from_raw, to_datatype
from charonia.perf.data.images import is_image, read_image
from charonia.perf.data.json_file import read_json
from charonia.perf.data.spec import ModelSpec, TensorSpec, names
from charonia.perf.data.steps import FILE_BYTES_MAX, Step, Stream


def read_path(path: Path, spec: ModelSpec) -> list[Stream]:
    """Return the streams that a file or folder holds.

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
        return [Step({spec.inputs[0].name: image}, None, file.name) for file, image in zip(files, images, strict=True)]
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
    """Return the items that a file holds for a tensor."""
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
    """Return the items of an array: one in the shape of an item, or several along another dimension in front."""
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
    """Return the steps of arrays by name; a tensor with a single item is the same in every step."""
    tensors = inputs | outputs
    count = max(map(len, tensors.values()))
    for name, items in tensors.items():
        if len(items) not in (1, count):
            longest = next(other for other, others in tensors.items() if len(others) == count)
            raise invalid(f"{where}: '{name}': expected {count} items, as many as '{longest}', got {len(items)}")
    return [
        Step(
            {name: items[index % len(items)] for name, items in inputs.items()},
            {name: items[index % len(items)] for name, items in outputs.items()} or None,
            f"{where}: step {index}",
        )
        for index in range(count)
    ]
