"""A working request, written for common tools: curl, Python and `charonia infer`.

curl gets the shortest body that carries the inputs: named plain values (`/generate`) where the server can derive the
shapes from them, else KServe v2 JSON. An input of many elements, or of 16-bit floating-point numbers, which JSON cannot
carry, is sent in binary form: zeros from /dev/zero.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from urllib.parse import quote

import numpy as np

from charonia.config.model import ModelConfig
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError
from charonia.core.request import ParameterValue
from charonia.core.tensor import Tensor
from charonia.wire.endpoint import parse_url
from charonia.wire.example_inputs import example_dims, example_inputs
from charonia.wire.json_text import dump
from charonia.wire.plain_values import plain_output, plain_values
from charonia.wire.v2_data import NO_JSON_FORM, encode_data
from charonia.wire.v2_generate import infer_shape

URL = "localhost:8000"
"""Default URL of a server, for the client library."""

ELEMENTS_MAX = 32
"""Longest input that is written out if all its elements are the same."""

EDITED_ELEMENTS_MAX = 1024
"""Longest input that is written out if they differ."""

HINT_ELEMENTS_MAX = 256
"""Most elements in a body that an error shows."""

_HALF = (DataType.FP16, DataType.BF16)


@dataclass(frozen=True, slots=True)
class ExampleRequest:
    """A request for a model.

    Attributes:
        config: The model's complete configuration.
        inputs: Its inputs by name.
        version: Model version, "" for the latest.
        url: URL of the server: `HOST:PORT`, or with `http://` or `https://`.
        files: Names of files by the inputs whose value they are.
        parameters: Parameters of the request.
        has_key: Whether the server requires a key; code reads it from the variable KEY.
    """

    config: ModelConfig
    inputs: Mapping[str, Tensor]
    version: str = ""
    url: str = URL
    files: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)
    has_key: bool = False

    @property
    def path(self) -> str:
        """Path of the model on the server, without a leading slash."""
        version = f"/versions/{self.version}" if self.version else ""
        return f"v2/models/{quote(self.config.name, safe='')}{version}"

    def generate_body(self) -> dict[str, object] | None:
        """Return the body with named plain values, None if the server could not derive the shapes from them."""
        dims = {model_input.name: model_input.dims for model_input in self.config.input}
        lead = (-1,) if self.config.max_batch_size > 0 else ()
        body: dict[str, object] = {}
        values = plain_values(self.config)
        for name, tensor in self.inputs.items():
            try:
                if values is not None:
                    is_list = bool(lead) and len(tensor.array) != 1
                    plain_value = plain_output(self.config, values.inputs.get(name, {}), tensor, is_list=is_list)
                    body[name] = json.loads(dump(plain_value))
                    continue
                plain = _plain(tensor)
                if infer_shape(name, (*lead, *dims.get(name, ())), tensor.array.size) != tensor.shape:
                    return None
            except (ServingError, ValueError):
                return None  # no JSON form, a text that is not the JSON of its type, or no shape fits
            body[name] = plain[0] if len(plain) == 1 else plain
        return {**body, **self.parameters}

    def infer_body(self) -> dict[str, object] | None:
        """Return the KServe v2 body with all data in JSON, None if JSON cannot carry it."""
        try:
            inputs = [{**_head(tensor), "data": _plain(tensor)} for tensor in self.inputs.values()]
        except ServingError:
            return None
        return {"inputs": inputs, "parameters": dict(self.parameters)} if self.parameters else {"inputs": inputs}

    def curl(self) -> str:
        """Return a command for a shell; "" where curl cannot make the body.

        These are streams of responses to inputs that JSON cannot carry, and files that are not the only input.
        """
        base = f"{'' if '://' in self.url else 'http://'}{self.url}/{self.path}"
        if self.files:
            return self._curl_file(base)
        is_short = all(_is_short(tensor) for tensor in self.inputs.values())
        plain = self.generate_body() if is_short or self.config.is_decoupled else None
        if self.config.is_decoupled:
            return f"curl -N {_word(base)}/generate_stream{self._key} -d {_json(plain)}" if plain is not None else ""
        if plain is not None and not self._has_half_outputs:
            return f"curl {_word(base)}/generate{self._key} -d {_json(plain)}"
        return self._curl_infer(_word(base) + "/infer")

    def python(self) -> str:
        """Return a program that uses `charonia.client`; "" for files that have to be converted first."""
        texts = {model_input.name for model_input in self.config.input if model_input.data_type is DataType.BYTES}
        if any(name not in texts and not file.endswith(".npy") for name, file in self.files.items()):
            return ""
        stream = self.config.is_decoupled
        url = grpc_url(self.url) if stream else self.url
        values = {name: _python_value(tensor) for name, tensor in self.inputs.items()}
        values |= {name: _python_file(file) for name, file in self.files.items()}
        inputs = [f"    {_quoted(name)}: {value}," for name, value in values.items()]
        lines = self._imports(list(values.values()))
        lines += ["inputs = {", *inputs, "}"] if inputs else ["inputs = {}"]
        options = ""
        if self.has_key:
            lines.append("""options = WireOptions(headers=[("Authorization", f"Bearer {os.environ['KEY']}")])""")
            options = ", options=options"
        lines.append(f"with Client({_quoted(url)}{options}) as client:")
        version = f", version={_quoted(self.version)}" if self.version else ""
        parameters = f", parameters={dict(self.parameters)!r}" if self.parameters else ""
        arguments = f"{_quoted(self.config.name)}, inputs{version}{parameters}"
        indent = "    "
        if stream:
            lines.append(f"    for result in client.stream_infer({arguments}):")
            indent *= 2
        else:
            lines.append(f"    result = client.infer({arguments})")
        # Language models give some outputs only to a request that asks for them.
        unasked = {model_input.name for model_input in self.config.input} - self.inputs.keys()
        returned = [
            model_input.name for model_input in self.config.output if f"return_{model_input.name}" not in unasked
        ]
        lines += [f"{indent}print(result[{_quoted(name)}])" for name in returned]
        return "\n".join(lines) + "\n"

    def _imports(self, values: Sequence[str]) -> list[str]:
        """Return the imports that a program needs, and an empty line."""
        standard = ["import os"] if self.has_key else []
        standard += ["from pathlib import Path"] if any(value.startswith("Path(") for value in values) else []
        installed = ["import numpy as np"] if any("np." in value for value in values) else []
        names = "Client, WireOptions" if self.has_key else "Client"
        return [*standard, *([""] if standard else []), *installed, f"from charonia.client import {names}", ""]

    def infer_command(self) -> str:
        """Return the command `charonia infer`, which makes up inputs that are not given; "" for other parameters."""
        if dict(self.parameters) != example_parameters(self.config):
            return ""
        words = ["charonia", "infer", self.config.name]
        if self.url != URL:
            words += ["-u", self.url]
        if self.version:
            words += ["--model-version", self.version]
        for name, tensor in self.inputs.items():
            if _is_short(tensor) and tensor.datatype not in _HALF:
                words += ["-i", f"{name}={_argument(tensor)}"]
        for name, file in self.files.items():
            words += ["-i", f"{name}=@{file}"]
        return shlex.join([*words, "--stream"] if self.config.is_decoupled else words) + self._key

    @property
    def _has_half_outputs(self) -> bool:
        return any(output.data_type in _HALF for output in self.config.output)

    @property
    def _key(self) -> str:
        return ' -H "Authorization: Bearer $KEY"' if self.has_key else ""

    def _curl_file(self, base: str) -> str:
        """Return a command that sends a file unchanged, which is possible for the only input of a model."""
        (file, *others) = self.files.values()
        is_only = not others and len(self.config.input) == 1 and not self.parameters
        if not is_only or self.config.is_decoupled or self.config.input[0].data_type is not DataType.BYTES:
            return ""  # not BYTES: a picture or an array, which has to be read first
        length = "'Inference-Header-Content-Length: 0'"
        return (
            f"curl {_word(base)}/infer{self._key} -H {length} --data-binary {_word('@' + file)} --output response.bin"
        )

    def _curl_infer(self, url: str) -> str:
        entries, binary_bytes = list[dict[str, object]](), 0
        for tensor in self.inputs.values():
            if _is_short(tensor) and tensor.datatype not in _HALF:
                entries.append({**_head(tensor), "data": _plain(tensor)})
            else:
                size = (tensor.datatype.byte_size or 4) * tensor.array.size  # four zeros are an empty string
                entries.append({**_head(tensor), "parameters": {"binary_data_size": size}})
                binary_bytes += size
        document: dict[str, object] = {"inputs": entries}
        parameters = dict(self.parameters)
        tail = ""
        if self._has_half_outputs:
            parameters["binary_data_output"] = True
            tail = " --output response.bin"
        if parameters:
            document["parameters"] = parameters
        if not binary_bytes:
            return f"curl {url}{self._key} -d {_json(document)}{tail}"
        length = len(dump(document))
        return (
            f"(printf %s {_json(document)}; head -c {binary_bytes} /dev/zero) | curl {url}{self._key}"
            f" -H 'Inference-Header-Content-Length: {length}' --data-binary @-{tail}"
        )


def grpc_url(url: str) -> str:
    """Return the URL of the gRPC endpoint of a server whose HTTP endpoint has this one: the next port, by default."""
    endpoint = parse_url(url)
    return f"grpc{'s' * endpoint.tls}://{replace(endpoint, port=endpoint.port + 1).authority}"


def example_request(config: ModelConfig, *, version: str = "", url: str = URL) -> ExampleRequest:
    """Return a request with made-up inputs for a model.

    Args:
        config: The model's complete configuration.
        version: Model version, "" for the latest.
        url: URL of the server, as for `charonia.client.Client`.
    """
    return ExampleRequest(config, example_inputs(config), version, url, parameters=example_parameters(config))


def example_parameters(config: ModelConfig) -> dict[str, ParameterValue]:
    """Return the request parameters that a model needs: the id of a sequence that is whole with this one request."""
    if config.sequence_batching is None:
        return {}
    return {"sequence_id": 1, "sequence_start": True, "sequence_end": True}


def body_hint(config: ModelConfig) -> str:
    """Return a hint for a body that cannot be read: one that can be, or the inputs where it would be long."""
    binary = [tensor.name for tensor in config.input if tensor.data_type in NO_JSON_FORM]
    if binary:
        return (
            f"send the elements of {', '.join(binary)} in binary form, after the JSON header, whose length the header "
            "field Inference-Header-Content-Length states, or use gRPC; charonia.client does so by itself"
        )
    batched = config.max_batch_size > 0
    elements = sum(
        prod(example_dims(tensor.dims, tensor.data_type, batched=batched))
        for tensor in config.input
        if tensor.data_type is not None
    )
    body = example_request(config).infer_body() if elements <= HINT_ELEMENTS_MAX else None
    if body is not None:
        return f"a body for this model: {dump(body).decode()}"
    inputs = (
        f"{tensor.name} {tensor.data_type.wire if tensor.data_type is not None else ''} "
        f"{[-1, *tensor.dims] if batched else list(tensor.dims)}"
        for tensor in config.input
    )
    return (
        'a body is {"inputs": [{"name": NAME, "datatype": TYPE, "shape": SHAPE, "data": ELEMENTS}]}; the inputs of '
        f"this model are {', '.join(inputs)}"
    )


def _head(tensor: Tensor) -> dict[str, object]:
    return {"name": tensor.name, "shape": list(tensor.shape), "datatype": tensor.datatype.wire}


def _plain(tensor: Tensor) -> list[object]:
    data = encode_data(tensor)
    return list(data) if isinstance(data, list) else data.tolist()


def _is_short(tensor: Tensor) -> bool:
    size = tensor.array.size
    return size <= ELEMENTS_MAX or (size <= EDITED_ELEMENTS_MAX and _constant(tensor) is None)


def _json(document: object) -> str:
    return shlex.quote(dump(document, literals=True).decode())


def _word(url: str) -> str:
    return shlex.quote(url)


def _constant(tensor: Tensor) -> object:
    """Return the value that all elements have, None if they differ."""
    if not tensor.array.size:
        return None
    first = tensor.array.ravel()[:1]
    return first.tolist()[0] if bool((tensor.array == first).all()) else None


def _python_value(tensor: Tensor) -> str:
    """Return an expression for an input: a nested list where that is short, which takes the model's datatype."""
    shape, datatype = tensor.shape, tensor.datatype
    if _is_short(tensor) and tensor.datatype is not DataType.BF16:
        if datatype is DataType.BYTES:
            texts = np.array([_text(element) for element in tensor.array.ravel().tolist()], object).reshape(shape)
            # JSON has the double quotes that Python's own style has; it cannot write bytes.
            return (
                json.dumps(texts.tolist()) if all(isinstance(e, str) for e in texts.ravel()) else repr(texts.tolist())
            )
        return repr(tensor.array.tolist())
    value = _constant(tensor)
    if datatype is DataType.BYTES:
        return f"np.full({shape}, {_text(value or b'')!r}, object)"
    if datatype is DataType.BF16:
        numbers = (np.atleast_1d(tensor.array).astype(np.uint32) << 16).view(np.float32)
        if value is None and _is_short(tensor):
            return f"(np.array({numbers.tolist()}, np.float32), 'BF16')"
        return f"(np.full({shape}, {numbers.flat[0] if value is not None else 0.0}, np.float32), 'BF16')"
    name = "bool_" if datatype is DataType.BOOL else datatype.numpy.name
    return f"np.full({shape}, {value if value is not None else 0}, np.{name})"


def _python_file(file: str) -> str:
    return f"np.load({_quoted(file)})" if file.endswith(".npy") else f"Path({_quoted(file)}).read_bytes()"


def _quoted(text: str) -> str:
    return json.dumps(text)


def _text(element: object) -> object:
    """Return a BYTES element as str where it is text."""
    try:
        return element.decode() if isinstance(element, bytes) else element
    except UnicodeDecodeError:
        return element


def _argument(tensor: Tensor) -> str:
    """Return an input as `charonia infer` reads it: the element itself, or JSON."""
    plain = _plain(tensor)
    if len(plain) == 1:
        element = plain[0]
        return element if isinstance(element, str) else dump(element, literals=True).decode()
    return dump(tensor.array.tolist() if tensor.datatype is not DataType.BYTES else plain, literals=True).decode()
