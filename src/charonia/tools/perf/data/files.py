"""Input data from .npy files, pictures and folders.

A folder has a file for each input, with the input's name: raw row-major elements, text with an element per line for
strings, or an .npy file or picture with its suffix. Files with the names of outputs hold the expected outputs. For a
model with one input, the folder may hold pictures of any name instead: each is a step, in the order of names.

An input of strings, or of UINT8 with one dimension, gets the encoded picture, and the model decodes it. Any other input
of UINT8 or floating-point numbers gets pixels, in the order of dimensions of the model's configuration (`format`);
without it, the position of a dimension of 1 or 3 decides between HWC and CHW. A picture is resized to a fixed height
and width. UINT8 has values from 0 to 255, floating-point numbers from 0 to 1.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from charonia.core.dtypes import DataType
from charonia.core.errors import invalid, unsupported
from charonia.core.tensor import Array
from charonia.tools.perf.data.convert import to_bfloat
from charonia.tools.perf.data.spec import TensorSpec
from charonia.wire.tensors import bytes_array

if TYPE_CHECKING:
    from PIL.Image import Image
from charonia.core.errors import ServingError
from charonia.install_hint import package_hint
from charonia.tools.perf.data.convert import from_list, from_raw, to_datatype
from charonia.tools.perf.data.json_file import read_json
from charonia.tools.perf.data.spec import FILE_BYTES_MAX, InputStep, ModelSpec, Stream, names

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff"})

PIXELS_MAX = 200_000_000
"""Limit of pixels of a picture, against small files that decompress to exhaust memory."""

_CHANNELS = {1: "L", 3: "RGB"}
_FLOATS = (DataType.FP16, DataType.FP32, DataType.FP64, DataType.BF16)


def is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES


def read_image(path: Path, spec: TensorSpec) -> Array:
    """Return a picture as an item of an input.

    Raises:
        ServingError: INVALID_ARG if the input does not accept pictures or the file is invalid; UNSUPPORTED without
            Pillow.
    """
    where = f"{path.name}: input '{spec.name}'"
    if spec.datatype is DataType.BYTES or (spec.datatype is DataType.UINT8 and len(spec.shape) == 1):
        return _file(path, spec, where)
    layout = _layout(spec, where)
    sizes = dict(zip(layout, spec.shape, strict=True))
    image = _opened(path, where)
    channels = sizes.get("C", 1)
    if channels == -1:
        channels = 1 if image.mode in ("1", "L") else 3
    if channels not in _CHANNELS:
        raise invalid(f"{where}: expected 1 or 3 channels, got {channels}")
    image = image.convert(_CHANNELS[channels])
    height = image.height if sizes["H"] == -1 else sizes["H"]
    width = image.width if sizes["W"] == -1 else sizes["W"]
    if (width, height) != image.size:
        image = image.resize((width, height))
    pixels = np.asarray(image, np.uint8).reshape(height, width, channels)
    if layout == "CHW":
        pixels = pixels.transpose(2, 0, 1)
    return _as_datatype(spec, np.ascontiguousarray(pixels.reshape(height, width) if layout == "HW" else pixels))


def _layout(spec: TensorSpec, where: str) -> str:
    shape = spec.shape
    if spec.datatype is not DataType.UINT8 and spec.datatype not in _FLOATS:
        raise invalid(f"{where}: expected an input of UINT8, floating-point numbers or BYTES, got {spec.datatype.wire}")
    if len(shape) == 2:
        return "HW"
    if len(shape) != 3:
        raise invalid(f"{where}: expected an input of 2 or 3 dimensions for a picture, got {list(shape)}")
    if spec.layout:
        return spec.layout
    if shape[2] in _CHANNELS and shape[0] not in _CHANNELS:
        return "HWC"
    if shape[0] in _CHANNELS and shape[2] not in _CHANNELS:
        return "CHW"
    raise invalid(
        f"{where}: expected a first or a last dimension of 1 or 3 (channels), got {list(shape)}",
        hint="`format: FORMAT_NCHW` or `FORMAT_NHWC` in the model's configuration says which it is",
    )


def _opened(path: Path, where: str) -> "Image":
    try:
        from PIL import Image, UnidentifiedImageError
    except ModuleNotFoundError:
        raise unsupported(f"{where}: pictures need the package Pillow", hint=package_hint("pillow")) from None
    try:
        with Image.open(path) as image:
            if image.width * image.height > PIXELS_MAX:
                raise invalid(f"{where}: expected at most {PIXELS_MAX} pixels, got {image.width} x {image.height}")
            return image.copy()
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        raise invalid(f"{where}: expected a picture, got: {str(error).replace(str(path), path.name)}") from None


def _file(path: Path, spec: TensorSpec, where: str) -> Array:
    content = path.read_bytes()
    if spec.datatype is DataType.UINT8:
        shape: tuple[int, ...] = (len(content),)
        made: Array = np.frombuffer(content, np.uint8)
    else:
        shape = tuple(1 if size == -1 else size for size in spec.shape)
        made = bytes_array(spec.name, shape, [content]) if np.prod(shape) == 1 else np.empty(0, object)
    if not spec.fits(shape) or made.size != np.prod(shape):
        raise invalid(f"{where}: expected an input that takes one file, got one of {spec}")
    return made


def _as_datatype(spec: TensorSpec, pixels: Array) -> Array:
    if spec.datatype is DataType.UINT8:
        return pixels
    scaled = pixels.astype(np.float32) / np.float32(255)
    return to_bfloat(scaled) if spec.datatype is DataType.BF16 else scaled.astype(spec.datatype.numpy)


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
