"""Pictures as tensors.

An input of strings, or of UINT8 with one dimension, takes the file as it is: the model decodes it. Any other input of
UINT8 or floating-point numbers takes pixels: in the order of dimensions that the model's configuration names
(`format`), else HWC or CHW by where a dimension of 1 or 3 is. Fixed height and width resize the picture, variable ones
keep it. UINT8 has values from 0 to 255, floating-point numbers from 0 to 1.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from charonia.core.dtypes import DataType
from charonia.core.errors import invalid, unsupported
from charonia.core.tensor import Array
from charonia.perf.data.convert import to_bfloat
from charonia.perf.data.spec import TensorSpec
from charonia.protocol.tensors import bytes_array

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff"})

PIXELS_MAX = 200_000_000
"""Most pixels of a picture, so that a small file cannot take all memory."""

_CHANNELS = {1: "L", 3: "RGB"}
_FLOATS = (DataType.FP16, DataType.FP32, DataType.FP64, DataType.BF16)


def is_image(path: Path) -> bool:
    """Return whether a file's name is that of a picture."""
    return path.suffix.lower() in SUFFIXES


def read_image(path: Path, spec: TensorSpec) -> Array:
    """Return a picture as an item of an input.

    Raises:
        ServingError: INVALID_ARG when the input takes no pictures or the file is none; UNSUPPORTED without Pillow.
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
        raise unsupported(f"{where}: pictures need the package Pillow", hint="pip install pillow") from None
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
