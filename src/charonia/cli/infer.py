"""`charonia infer`: send one request and print the answer.

A text is one element, or JSON. A file is what its name ends with: `.npy`, `.json`, `.txt`, an image, or else bytes.
Inputs that are not given are made up. Exit status: 0 done, 1 the server does not respond or refuses, 2 misuse.
"""

import base64
import binascii
import io
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import numpy as np

from charonia.cli.command_line import CommandLine, Option, carry_out, flag
from charonia.cli.server_access import THIS_MACHINE, ServerAccess, access_options
from charonia.cli.values import name_and_value, only_model, seconds
from charonia.client import Client, ClientError, Failure, InferResult
from charonia.config.json_form import from_json
from charonia.config.model import ModelConfig, ModelInput
from charonia.core.dtypes import BY_NUMPY, DataType
from charonia.core.errors import ServingError, invalid, not_found, unsupported
from charonia.core.metadata import ModelMetadata, TensorMetadata
from charonia.core.tensor import Array, Tensor
from charonia.install_hint import package_hint
from charonia.wire.endpoint import parse_url
from charonia.wire.example_inputs import example_dims
from charonia.wire.example_request import ExampleRequest, example_request, grpc_url
from charonia.wire.json_text import dump
from charonia.wire.plain_values import labels_of
from charonia.wire.python_values import make_tensors
from charonia.wire.v2_generate import infer_shape, with_json_text

STDIN = "-"
"""Path of standard input."""


@dataclass(frozen=True, slots=True)
class InferOptions:
    """The request, and how its answer is printed."""

    model: str = ""
    inputs: tuple[tuple[str, str], ...] = ()
    outputs: tuple[tuple[str, str], ...] = ()
    server: ServerAccess = THIS_MACHINE
    version: str = ""
    timeout_s: float = 60.0
    stream: bool = False
    curl: bool = False
    python: bool = False
    json: bool = False


# fmt: off
LINE = CommandLine(
    command="charonia infer",
    intro="""\
usage: charonia infer [OPTIONS] [MODEL]

Send one request to a model and print the answer. Inputs that are not given are made up.
""",
    groups={
        "Options": (
            Option("--model -m MODEL", "model", str, "MODEL", "Name of the model", default="the only one"),
            Option(
                "--input -i", "inputs", name_and_value, "NAME=VALUE",
                "Value of an input: text, a number, JSON, or @FILE for an image, .npy, .json, .txt or any other file "
                "(@- for standard input); repeatable", tuple
            ),
            Option("--output -o", "outputs", name_and_value, "NAME=FILE",
                   "Write an output to a file: .npy, or the bytes of text and images; repeatable", tuple),
            *access_options("; grpc:// for gRPC"),
            Option("--model-version", "version", str, "VERSION", "That version", default="the latest"),
            Option("--timeout", "timeout_s", seconds, "SECONDS", "Longest time to wait for the answer"),
            flag("--stream", "stream", True, "Print each response when it arrives; the default for models that stream"),
            flag("--curl", "curl", True, "Print the request as a command for curl instead of sending it"),
            flag("--python", "python", True, "Print the request as a program in Python instead of sending it"),
            flag("--json", "json", True, "Print JSON"),
        )
    },
    record=InferOptions(),
)
# fmt: on


def run(arguments: Sequence[str]) -> int:
    return carry_out(LINE, arguments, _infer)


def _infer(options: InferOptions) -> int:
    try:
        return _answer(options)
    except ServingError as error:
        error.hint = error.hint or file_hint(error.message, options.inputs)
        raise


def file_hint(message: str, inputs: Sequence[tuple[str, str]]) -> str:
    """Return a hint for an error about an input whose text is the name of a file, "" for none."""
    for name, text in inputs:
        with suppress(OSError, ValueError):  # a longer text than names are, or one with a null byte
            if f"'{name}'" in message and Path(text).is_file():
                return f"-i {shlex.quote(f'{name}=@{text}')} sends the content of the file"
    return ""


def _answer(given: InferOptions) -> int:
    if given.curl and given.python:
        raise invalid("--curl, --python: expected one of them")
    url = given.server.url
    with given.server.client(given.timeout_s) as client:
        config = _config(client, given)
        request = example_request(config, version=given.version, url=url)
        request = replace(request, inputs={**request.inputs, **tensors_of(config, dict(given.inputs), _read, _picture)})
        if given.curl or given.python:
            print(_written(request, given))
            return 0
        if given.stream or config.is_decoupled:
            with given.server.client(given.timeout_s, _stream_url(url)) as streaming:
                _print_stream(streaming, request, given)
            return 0
        wanted = {
            output.name: CLASSES * bool(output.label_filename or labels_of(config, output.name)) * (not given.json)
            for output in config.output
        }
        result = client.infer(
            config.name, _values(request), wanted, version=given.version, parameters=request.parameters,
        )  # fmt: skip
        _save(result, given)
        _print(result, given, {name for name, count in wanted.items() if count})
    return 0


def _config(client: Client, options: InferOptions) -> ModelConfig:
    """Return the model's configuration."""
    try:
        model = options.model or only_model({entry.name for entry in client.repository_index(ready=True)})
        return from_json(dump(client.model_config(model, options.version)).decode())
    except ClientError as error:
        if error.failure is not Failure.STATUS:
            raise ServingError(error.code, error.message, hint="-u names the address of a server") from error
        raise


def _written(request: ExampleRequest, options: InferOptions) -> str:
    if options.python:
        return request.python().rstrip()
    curl = request.curl()
    if not curl:
        raise unsupported(f"curl cannot send the inputs of model '{request.config.name}'", hint="--python can")
    return curl


def _values(request: ExampleRequest) -> dict[str, Array | tuple[Array, str]]:
    """Return the inputs for the client, which cannot tell BF16 from UINT16 by itself."""
    return {
        name: (tensor.array, "BF16") if tensor.datatype is DataType.BF16 else tensor.array
        for name, tensor in request.inputs.items()
    }


def _stream_url(url: str) -> str:
    return url if parse_url(url).protocol == "grpc" else grpc_url(url)


def _print_stream(client: Client, request: ExampleRequest, options: InferOptions) -> None:
    is_text = False
    try:
        for result in client.stream_infer(request.config.name, _values(request), version=options.version):
            _save(result, options)
            text = None if options.json else piece(result.outputs)
            if text is None:
                _print(result, options, set())
                continue
            is_text = True
            print(text, end="", flush=True)
    finally:
        if is_text:
            print()


def _print(result: InferResult, options: InferOptions, labelled: set[str]) -> None:
    if options.json:
        print(dump(_plain(result), literals=True).decode(), flush=True)
        return
    for name, array in result.outputs.items():
        if name in labelled:
            print(classes(name, array), flush=True)
        else:
            print(describe(name, result.datatypes[name], array), flush=True)


def _plain(result: InferResult) -> dict[str, object]:
    return {
        name: list(_elements(array)) if array.dtype == np.object_ else array.tolist()
        for name, array in result.outputs.items()
    }


def _elements(array: Array) -> Iterator[str]:
    for element in array.ravel().tolist():
        try:
            yield element.decode()
        except UnicodeDecodeError:
            yield base64.b64encode(element).decode()


def _save(result: InferResult, options: InferOptions) -> None:
    for name, path in options.outputs:
        array = result.outputs.get(name)
        if array is None:
            raise invalid(f"--output {name}: expected an output of the answer: {', '.join(result.outputs)}")
        try:
            if path.endswith(".npy") and array.dtype != np.object_:
                np.save(path, array)
            elif array.dtype == np.object_:
                Path(path).write_bytes(b"".join(content_of(element) for element in array.ravel().tolist()))
            else:
                Path(path).write_bytes(array.tobytes())
        except OSError as error:
            raise invalid(f"--output {name}: cannot write '{path}': {error.strerror}") from error


def _read(path: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if path == STDIN else Path(path).expanduser().read_bytes()
    except OSError as error:
        raise invalid(f"--input: cannot read '{path}': {error.strerror}") from error


def _picture(content: bytes, height: int, width: int, multiple: int, mode: str) -> Array:
    try:
        from PIL import Image  # only images need it
    except ModuleNotFoundError:
        raise unsupported("--input: images need the package Pillow", hint=package_hint("pillow")) from None
    try:
        image = Image.open(io.BytesIO(content)).convert(mode)
    except OSError as error:
        raise invalid(f"--input: expected an image: {error}") from error
    own_width, own_height = (max(multiple, round(side / multiple) * multiple) for side in image.size)
    size = (width or own_width, height or own_height)
    if size != image.size:
        image = image.resize(size)
    array: Array = np.asarray(image)
    return array.reshape(array.shape[0], array.shape[1], -1)


ROWS_MAX = 20
COLUMNS_MAX = 10
"""Largest table that is printed whole."""

LISTED_MAX = 8
"""Numbers that are shown of a longer output."""

CLASSES = 5
"""Classes that are shown of an output with labels."""

_DATA_URL = "data:"


def describe(name: str, datatype: str, array: Array) -> str:
    """Return an output in lines: its name, datatype and shape, and its elements or a summary of them."""
    head = f"{name} {datatype}[{','.join(map(str, array.shape))}]"
    if array.dtype == np.object_:
        texts = [shown(element) for element in array.ravel().tolist()[:ROWS_MAX]]
        more = [f"... {array.size - ROWS_MAX} more"] if array.size > ROWS_MAX else []
        return (
            f"{head}: {texts[0]}" if array.size == 1 else "\n".join([head, *(f"  {text}" for text in [*texts, *more])])
        )
    if array.size <= 1:
        return f"{head}: {number(array.reshape(-1)[0])}" if array.size else head
    table: Array = array.reshape(-1, array.shape[-1]) if array.ndim > 1 else array.reshape(1, -1)
    if table.shape[0] <= ROWS_MAX and table.shape[1] <= COLUMNS_MAX:
        cells = [[number(element) for element in row] for row in table]
        width = max(len(cell) for row in cells for cell in row)
        return "\n".join([head, *("  " + "  ".join(cell.rjust(width) for cell in row) for row in cells)])
    return f"{head}\n{_summary(array)}"


def classes(name: str, array: Array) -> str:
    """Return the elements `value:index:label` of a classification as a table."""
    lines = [name]
    for element in array.ravel().tolist():
        value, index, label = ([*element.decode(errors="replace").split(":", 2), "", ""])[:3]
        lines.append(f"  {float(value):10.4f}  {label or index}")
    return "\n".join(lines)


def number(element: object) -> str:
    """Return a number, rounded to six significant digits."""
    if isinstance(element, np.generic):
        element = element.item()
    return f"{element:.6g}" if isinstance(element, float) else str(element)


def shown(element: object) -> str:
    """Return an element of a BYTES output: its text, or a description of its content."""
    if isinstance(element, bytes):
        try:
            element = element.decode()
        except UnicodeDecodeError:
            return f"{len(element)} bytes"
    text = str(element)
    if text.startswith(_DATA_URL):
        kind = text[len(_DATA_URL) :].partition(";")[0]
        return f"{kind}, {len(content_of(element))} bytes"
    return text


def content_of(element: object) -> bytes:
    """Return the bytes of an element for a file; a data URL is decoded."""
    data = element if isinstance(element, bytes) else str(element).encode()
    if data.startswith(_DATA_URL.encode()) and b"," in data:
        try:
            return base64.b64decode(data.partition(b",")[2], validate=True)
        except binascii.Error:
            return data
    return data


def piece(outputs: Mapping[str, Array]) -> str | None:
    """Return the text that a response adds to a stream of text, None for a response that is something else."""
    if len(outputs) != 1:
        return None
    (array,) = outputs.values()
    if array.dtype != np.object_ or array.size != 1:
        return None
    element = array.ravel().tolist()[0]
    if isinstance(element, bytes):
        try:
            element = element.decode()
        except UnicodeDecodeError:
            return None
    return None if element.startswith(_DATA_URL) else element


def _summary(array: Array) -> str:
    flat = array.reshape(-1)
    first = "  ".join(number(element) for element in flat[:LISTED_MAX])
    lines = [f"  {first}  ... {array.size - LISTED_MAX} more"]
    if array.dtype.kind in "iuf":
        finite = flat[np.isfinite(flat)] if array.dtype.kind == "f" else flat
        if finite.size:
            lowest, highest = number(finite.min()), number(finite.max())
            lines.append(f"  from {lowest} to {highest}, mean {number(float(finite.mean(dtype=np.float64)))}")
        last = array.reshape(-1, array.shape[-1])
        if array.ndim <= 2 and len(last) <= ROWS_MAX:
            lines += [f"  largest: {number(row.max())} at {int(row.argmax())}" for row in last]
    return "\n".join(lines)


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
        given: Text by input: a value, or `@` and the path of a file.
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
        return _image(config, target, content, picture)
    raise invalid(
        f"input '{target.name}': expected a file that is .npy, .json or an image for {_wire(target)}, got '{path}'"
    )


def _image(config: ModelConfig, target: ModelInput, content: bytes, picture: Picture) -> Array:
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
