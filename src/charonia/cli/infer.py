"""`charonia infer`: send one request and print the answer.

Inputs that are not given are made up. Exit status: 0 done, 1 the server does not respond or refuses, 2 misuse.
"""

import base64
import io
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from charonia.cli.command_line import CommandLine, Option, carry_out, flag
from charonia.cli.infer_inputs import tensors_of
from charonia.cli.infer_outputs import CLASSES, classes, content_of, describe, piece
from charonia.cli.values import HEADER_HELP, header, seconds, with_key
from charonia.client import Client, ClientError, Failure, InferResult, TlsOptions, WireOptions
from charonia.config.json_form import from_json
from charonia.config.model import ModelConfig
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, invalid, unsupported
from charonia.core.tensor import Array, Tensor
from charonia.install_hint import package_hint
from charonia.wire.endpoint import parse_url
from charonia.wire.example_request import URL, ExampleRequest, example_request, grpc_url
from charonia.wire.json_text import dump

STDIN = "-"
"""Path of standard input."""


@dataclass(frozen=True, slots=True)
class InferOptions:
    """The request, and how its answer is printed."""

    model: str = ""
    inputs: tuple[tuple[str, str], ...] = ()
    outputs: tuple[tuple[str, str], ...] = ()
    url: str = URL
    version: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    timeout_s: float = 60.0
    ssl_ca: str = ""
    stream: bool = False
    curl: bool = False
    python: bool = False
    json: bool = False


def assigned(value: object) -> tuple[str, str]:
    """Read NAME=VALUE."""
    name, equals, text = str(value).partition("=")
    if not equals or not name:
        raise ValueError(f"expected NAME=VALUE, got '{value}'")
    return name, text


LINE = CommandLine(
    command="charonia infer",
    intro="""\
usage: charonia infer [OPTIONS] MODEL

Send one request to a model and print the answer. Inputs that are not given are made up.
""",
    groups={
        "Options": (
            Option("MODEL", "model", str, "MODEL", "Name of the model"),
            Option(
                *("--input -i", "inputs", assigned, "NAME=VALUE"),
                "Value of an input: text, a number, JSON, or @FILE for an image, .npy, .json, .txt or any other file "
                "(@- for standard input); repeatable",
                tuple,
            ),
            Option(
                *("--output -o", "outputs", assigned, "NAME=FILE"),
                "Write an output to a file: .npy, or the bytes of text and images; repeatable",
                tuple,
            ),
            Option(
                "--url -u", "url", str, "URL", "HOST:PORT of the server's HTTP endpoint, or a URL; grpc:// for gRPC"
            ),
            Option("--model-version", "version", str, "VERSION", "That version", default="the newest"),
            Option("--header -H", "headers", header, "NAME:VALUE|@FILE", HEADER_HELP, tuple),
            Option("--timeout", "timeout_s", seconds, "SECONDS", "Longest time to wait for the answer"),
            Option("--ssl-ca", "ssl_ca", str, "FILE", "Certificates to trust, for https", default="the system's"),
            flag("--stream", "stream", True, "Print responses as they come; the default for models that stream"),
            flag("--curl", "curl", True, "Print the request as a command for curl instead of sending it"),
            flag("--python", "python", True, "Print the request as a program in Python instead of sending it"),
            flag("--json", "json", True, "Print JSON"),
        )
    },
    record=InferOptions(),
)


def run(arguments: Sequence[str]) -> int:
    return carry_out(LINE, arguments, _infer)


def _infer(given: InferOptions) -> int:
    try:
        return _answer(given)
    except ServingError as error:
        error.hint = error.hint or file_hint(error.message, given.inputs)
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
    options = WireOptions(headers=with_key(given.headers), tls=TlsOptions(ca_file=given.ssl_ca))
    with Client(given.url, timeout_s=given.timeout_s, options=options) as client:
        config = _config(client, given)
        request = example_request(config, version=given.version, url=given.url)
        request = replace(request, inputs={**request.inputs, **_given_tensors(config, given)})
        if given.curl or given.python:
            print(_written(request, given))
            return 0
        if given.stream or config.is_decoupled:
            with Client(_stream_url(given.url), timeout_s=given.timeout_s, options=options) as streaming:
                _print_stream(streaming, request, given)
            return 0
        wanted = {output.name: CLASSES if output.label_filename and not given.json else 0 for output in config.output}
        result = client.infer(
            *(config.name, _values(request), wanted), version=given.version, parameters=request.parameters
        )
        _save(result, given)
        _print(result, given, {name for name, count in wanted.items() if count})
    return 0


def _config(client: Client, given: InferOptions) -> ModelConfig:
    """Return the model's configuration.

    Raises:
        ServingError: The server does not answer, or has no such model.
    """
    try:
        return from_json(dump(client.model_config(given.model, given.version)).decode())
    except ClientError as error:
        if error.failure is not Failure.STATUS:
            raise ServingError(error.code, error.message, hint="-u names the address of a server") from error
        raise


def _given_tensors(config: ModelConfig, given: InferOptions) -> dict[str, Tensor]:
    return tensors_of(config, dict(given.inputs), _read, _picture)


def _written(request: ExampleRequest, given: InferOptions) -> str:
    if given.python:
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


def _print_stream(client: Client, request: ExampleRequest, given: InferOptions) -> None:
    is_text = False
    try:
        for result in client.stream_infer(request.config.name, _values(request), version=given.version):
            _save(result, given)
            text = None if given.json else piece(result.outputs)
            if text is None:
                _print(result, given, set())
                continue
            is_text = True
            print(text, end="", flush=True)
    finally:
        if is_text:
            print()


def _print(result: InferResult, given: InferOptions, labelled: set[str]) -> None:
    if given.json:
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


def _save(result: InferResult, given: InferOptions) -> None:
    for name, path in given.outputs:
        array = result.outputs.get(name)
        if array is None:
            raise invalid(f"--output {name}: the answer has no such output: it has {', '.join(result.outputs)}")
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
