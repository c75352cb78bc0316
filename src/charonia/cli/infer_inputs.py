"""Inputs of `charonia infer`: text and the content of files to tensors of a model. Pure.

Text is one element, or JSON. A file is what its name ends with: `.npy`, `.json`, `.txt`, an image, or else bytes.
"""

import io
import json
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath

import numpy as np

from charonia.client.requests import make_tensors
from charonia.config.model import ModelConfig, ModelInput
from charonia.core.dtypes import BY_NUMPY, DataType
from charonia.core.errors import ServingError, invalid, not_found
from charonia.core.metadata import ModelMetadata, TensorMetadata
from charonia.core.tensor import Array, Tensor
from charonia.wire.example_inputs import example_dims
from charonia.wire.v2_generate import infer_shape, with_json_text

IMAGES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
"""Suffixes of images."""

_CHANNELS = (1, 3, 4)
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}

GRID = 32
"""Networks that halve their picture again and again need sides that are multiples of this."""

Picture = Callable[[bytes, int, int, int, str], Array]
"""Decodes an image file to an array of UINT8, [height, width, channels], given height and width (0 for its own, rounded
to a multiple of the next), that multiple, and the mode of Pillow."""


def tensors_of(
    config: ModelConfig, given: Mapping[str, str], read: Callable[[str], bytes], picture: Picture
) -> dict[str, Tensor]:
    """Return the tensors of inputs that were given as text.

    Args:
        config: The model's complete configuration.
        given: Text by input: a value, or `@` and the path of a file.
        read: Returns the content of a file.
        picture: Decodes images.

    Raises:
        ServingError: The model has no such input, or a text is no value of it.
    """
    inputs = {each.name: each for each in config.input}
    tensors = {}
    for name, text in given.items():
        target = inputs.get(name)
        if target is None:
            raise not_found(f"model '{config.name}' has no input '{name}': it has {', '.join(inputs) or 'none'}")
        value = (
            _file_value(config, target, text[1:], read, picture) if text.startswith("@") else _text_value(target, text)
        )
        tensors[name] = _tensor(config, target, value)
    return tensors


def _text_value(target: ModelInput, text: str) -> object:
    is_text = target.data_type is DataType.BYTES
    if is_text and not text.startswith(("[", '"')):
        return text
    try:
        return json.loads(text)
    except ValueError:
        pass
    if is_text:
        return text
    if "," in text and not text.startswith("["):
        return _text_value(target, f"[{text}]")
    word = text.lower()
    if word in ("true", "false"):
        return word == "true"
    raise invalid(
        f"input '{target.name}': expected a number or JSON for {_wire(target)}, got '{text}'",
        hint=f"-i {target.name}=@FILE reads a file: .npy, .json or an image",
    )


def _file_value(
    config: ModelConfig, target: ModelInput, path: str, read: Callable[[str], bytes], picture: Picture
) -> object:
    content = read(path)
    suffix = PurePosixPath(path).suffix.lower()
    if suffix == ".npy":
        try:
            loaded: Array = np.load(io.BytesIO(content), allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise invalid(f"input '{target.name}': '{path}' cannot be read: {error}") from error
        return loaded
    if suffix == ".json":
        try:
            return json.loads(content)
        except ValueError as error:
            raise invalid(f"input '{target.name}': '{path}' is not JSON: {error}") from error
    if target.data_type is DataType.BYTES:
        return content
    if suffix in IMAGES:
        return _picture(config, target, content, picture)
    raise invalid(
        f"input '{target.name}': expected a file that is .npy, .json or an image for {_wire(target)}, got '{path}'"
    )


def _picture(config: ModelConfig, target: ModelInput, content: bytes, picture: Picture) -> Array:
    """Return an image in the layout and size of an input; floating-point numbers are from 0 to 1."""
    datatype = target.data_type or DataType.FP32
    dims = target.dims if config.max_batch_size > 0 else target.dims[1:] if len(target.dims) == 4 else target.dims
    if len(dims) == 2:
        dims = (*dims, 1)
    if len(dims) != 3:
        raise invalid(f"input '{target.name}': an image has height, width and colours, got dims {list(target.dims)}")
    first = dims[0] in _CHANNELS or (dims[0] == -1 and dims[2] not in _CHANNELS)
    channels, height, width = dims if first else (dims[2], dims[0], dims[1])
    mode = _MODES.get(channels, "RGB")
    is_fraction = datatype.numpy.kind == "f" or datatype is DataType.BF16
    pixels = picture(content, max(height, 0), max(width, 0), GRID if is_fraction else 1, mode)
    array: Array = pixels.transpose(2, 0, 1) if first else pixels
    if len(target.dims) == 2:
        array = array.reshape(pixels.shape[:2])
    if datatype.numpy.kind == "f" and datatype is not DataType.BF16:
        return (array.astype(np.float32) / 255).astype(datatype.numpy)
    return array.astype(datatype.numpy)


def _tensor(config: ModelConfig, target: ModelInput, value: object) -> Tensor:
    datatype = target.data_type or DataType.FP32
    lead = (-1,) if config.max_batch_size > 0 else ()
    dims = (*lead, *target.dims)
    if isinstance(value, np.ndarray) and BY_NUMPY.get(value.dtype.newbyteorder("<")) is not datatype:
        value = value.tolist()  # so that elements are checked and converted
    if datatype is DataType.BYTES:
        value = with_json_text(value, dims)
    if not isinstance(value, list | np.ndarray):
        value = [value]
    metadata = ModelMetadata(config.name, (), "", (TensorMetadata(target.name, datatype, (1,)),), ())
    tensor = make_tensors(config.name, {target.name: value}, metadata)[target.name]
    return Tensor(target.name, datatype, tensor.array.reshape(_shape(target, dims, tensor.array)))


def _shape(target: ModelInput, dims: tuple[int, ...], array: Array) -> tuple[int, ...]:
    """Return the shape of an input: its own, one with a batch of one, or what follows from the number of elements."""
    for shape in (array.shape, (1, *array.shape)):
        if len(shape) == len(dims) and all(dim in (-1, size) for dim, size in zip(dims, shape, strict=True)):
            return shape
    try:
        return infer_shape(target.name, dims, array.size)
    except ServingError:
        example = list(example_dims(dims, target.data_type or DataType.FP32, batched=False))
        raise invalid(
            f"input '{target.name}': expected shape {list(dims)}, got {list(array.shape)}",
            hint=f"for example {example}",
        ) from None


def _wire(target: ModelInput) -> str:
    return target.data_type.wire if target.data_type is not None else "?"
