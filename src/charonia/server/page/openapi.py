"""The OpenAPI document of the loaded models. Pure.

Each model has its own paths for inference, with the names and datatypes of its tensors and an example that its server
accepts; all else is described once. `x-models` has the content of the page that does not fit OpenAPI;
`x-codeSamples`, which other viewers read too, has the same request in several languages.

Source: OpenAPI Specification 3.1.

A tensor's elements have a separate JSON schema by datatype, which bodies of `infer` refer to. The server reads flat and
nested arrays of `infer` alike, so their number is not part of a schema.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from charonia.config.model import ModelConfig, ModelInput, ModelOutput
from charonia.config.parameters import route_of
from charonia.core.dtypes import DataType
from charonia.core.metadata import ServerMetadata
from charonia.core.tensor import Tensor
from charonia.wire.example_request import ExampleRequest, example_request
from charonia.wire.openai_models import routes_of
from charonia.wire.plain_values import BASE64, CONTENT, PlainValues, Schema, labels_of, plain_values
from charonia.wire.v2_generate import BARE

Json = dict[str, object]

NO_JSON_FORM = (DataType.FP16, DataType.BF16)
"""Datatypes that JSON does not carry: such tensors are sent in binary form."""

COMPONENTS = "#/components/schemas/"

_FORMATS = {DataType.INT32: "int32", DataType.INT64: "int64", DataType.FP32: "float", DataType.FP64: "double"}


def element(datatype: DataType) -> Json:
    """Return the schema of one element."""
    kind = datatype.numpy.kind
    if datatype is DataType.BYTES:
        return {"type": "string"}
    if kind == "b":
        return {"type": "boolean"}
    found: Json = {"type": "number" if kind == "f" else "integer"}
    if datatype in _FORMATS:
        found["format"] = _FORMATS[datatype]
    if kind in "iu":
        bits = 8 * datatype.byte_size
        low, high = (0, 2**bits - 1) if kind == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        found |= {"minimum": low, "maximum": high}
    return found


def elements(datatype: DataType) -> Json:
    """Return the schema of a tensor's elements, flat or nested.

    It does not refer to itself for the arrays within: generators of clients make no types of such schemas.
    """
    return {
        "type": "array",
        "description": f"{datatype.wire} elements in row-major order, flat or nested",
        "items": {"anyOf": [element(datatype), {"type": "array", "items": {}}]},
    }


def shape_of(config: ModelConfig, tensor: ModelInput | ModelOutput) -> tuple[int, ...]:
    """Return the shape of requests and responses: with the batch dimension, and -1 for variable dimensions."""
    return (-1, *tensor.dims) if config.max_batch_size > 0 else tensor.dims


def signature_text(config: ModelConfig, tensor: ModelInput | ModelOutput) -> str:
    """Return datatype and shape, e.g. `FP32 [batch, 4]`."""
    dims = ["n" if dim == -1 else str(dim) for dim in tensor.dims]
    shape = ", ".join(["batch", *dims] if config.max_batch_size > 0 else dims)
    return f"{_wire(tensor)} [{shape}]"


def infer_request(config: ModelConfig) -> Json:
    """Return the schema of the body of `infer`."""
    inputs = [tensor for tensor in config.input if tensor.data_type is not None]
    entries = [_entry(config, tensor) for tensor in inputs]
    required = sum(not tensor.optional for tensor in inputs)
    array: Json = {"type": "array", "minItems": required, "maxItems": len(inputs), "items": {"oneOf": entries}}
    if not entries:
        array.pop("items")
    outputs = {
        "type": "array",
        "description": "The outputs to return, all by default",
        "items": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"enum": [output.name for output in config.output]},
                "parameters": {"$ref": COMPONENTS + "OutputParameters"},
            },
        },
    }
    properties = {
        "id": {"type": ["string", "null"], "description": "Returned with the response"},
        "inputs": array,
        "outputs": outputs,
        "parameters": {"$ref": COMPONENTS + "RequestParameters"},
    }
    return {"type": "object", "required": ["inputs"], "properties": properties}


def infer_response(config: ModelConfig) -> Json:
    """Return the schema of a response of `infer` with all outputs in JSON."""
    entries = [_entry(config, output) for output in config.output if output.data_type not in NO_JSON_FORM]
    array: Json = {"type": "array", "items": {"anyOf": [*entries, {"$ref": COMPONENTS + "Tensor"}]}}
    return {
        "type": "object",
        "required": ["model_name", "model_version", "outputs"],
        "properties": {**_RESPONSE, "outputs": array},
    }


def generate_request(config: ModelConfig) -> Json:
    """Return the schema of the body of `generate`: a member for each input, request parameters for the rest."""
    schemas = plain_values(config) or PlainValues()
    properties: Json = {"id": {"type": ["string", "null"]}}
    inputs = [tensor for tensor in config.input if tensor.data_type is not None]
    for tensor in inputs:
        schema = schemas.inputs.get(tensor.name)
        member = _given(config, tensor) if schema is None else _plain(config, tensor, schema)
        properties[tensor.name] = {"anyOf": [member, {"type": "null"}]} if tensor.optional else member
    return {
        "type": "object",
        "required": [tensor.name for tensor in inputs if not tensor.optional],
        "properties": properties,
        "additionalProperties": True,  # request parameters; a type would hold for the inputs as well in other languages
    }


def generate_response(config: ModelConfig) -> Json:
    """Return the schema of a response of `generate`."""
    return {
        "type": "object",
        "required": ["model_name", "model_version"],
        "properties": {**_RESPONSE, **_outputs(config)},
    }


def bare_response(config: ModelConfig) -> Json:
    """Return the schema of a response at the model's own path: the outputs, or the value of a single one."""
    members = _outputs(config)
    if members.keys() == {BARE}:
        only = members[BARE]
        assert isinstance(only, dict)
        return only
    return {"type": "object", "properties": members}


def _outputs(config: ModelConfig) -> Json:
    schemas = plain_values(config)
    members: Json = {}
    for output in config.output:
        if schemas is not None:
            members[output.name] = _plain(config, output, schemas.outputs.get(output.name, {}), has_nan=True)
        elif output.data_type not in NO_JSON_FORM:
            members[output.name] = _member(config, output)
    return members


def named_schemas(config: ModelConfig) -> Json:
    """Return the schemas that those of a function's values refer to, by their names in the document."""
    schemas = plain_values(config) or PlainValues()
    found: Json = {}
    for schema in (*schemas.inputs.values(), *schemas.outputs.values()):
        for name, named in schema.get(CONTENT, schema).get("$defs", {}).items():
            own = {key: value for key, value in named.items() if key != "title"}  # generators would take it for a name
            found[_named(config, name)] = _in_document(config, own)
    return found


def _plain(config: ModelConfig, tensor: ModelInput | ModelOutput, schema: Schema, *, has_nan: bool = False) -> Json:
    """Return the schema of a value of a function: one, or a list of them for a model with a batch dimension."""
    if CONTENT in schema:
        value = {key: each for key, each in schema[CONTENT].items() if key != "$defs"}
    elif schema.get("format") == "binary":
        base64 = {"type": "object", "required": [BASE64], "properties": {BASE64: {"type": "string"}}}
        value = {"anyOf": [{"type": "string"}, base64]}
    else:
        value = _nullable(dict(schema)) if has_nan else dict(schema)
    found = _in_document(config, value)
    assert isinstance(found, dict)
    if config.max_batch_size > 0:
        found = {"anyOf": [found, {"type": "array", "items": found}]}
    return {"description": signature_text(config, tensor), **found}


def _nullable(schema: Json) -> Json:
    """Return the schema of numbers that may be NaN, which JSON has as null."""
    items = schema.get("items")
    if isinstance(items, dict):
        return {**schema, "items": _nullable(items)}
    return {**schema, "type": ["number", "null"]} if schema.get("type") == "number" else schema


def _named(config: ModelConfig, name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", f"{config.name}.{name}")


def _in_document(config: ModelConfig, part: Any) -> Any:
    """Return a part of a schema with references into the document."""
    if isinstance(part, list):
        return [_in_document(config, each) for each in part]
    if not isinstance(part, dict):
        return part
    return {
        key: COMPONENTS + _named(config, value.rpartition("/")[2])
        if key == "$ref" and isinstance(value, str)
        else _in_document(config, value)
        for key, value in part.items()
    }


_RESPONSE = {"id": {"type": "string"}, "model_name": {"type": "string"}, "model_version": {"type": "string"}}


def _wire(tensor: ModelInput | ModelOutput) -> str:
    return tensor.data_type.wire if tensor.data_type is not None else ""


def _member(config: ModelConfig, tensor: ModelInput | ModelOutput) -> Json:
    datatype = tensor.data_type or DataType.FP32
    return {
        "description": signature_text(config, tensor),
        "anyOf": [element(datatype), {"$ref": COMPONENTS + datatype.wire}],
    }


def _given(config: ModelConfig, tensor: ModelInput) -> Json:
    """Return the schema of an input: an array, flat or nested, and a plain value where one element will do."""
    plain = element(tensor.data_type or DataType.FP32)
    forms = [plain] if all(dim in (-1, 1) for dim in tensor.dims) else []
    forms.append({"type": "array", "items": plain})
    shapes = {tensor.dims, shape_of(config, tensor)}
    forms += [_nested(plain, shape) for shape in sorted(shapes, key=len) if len(shape) > 1]
    return {"description": signature_text(config, tensor), "anyOf": forms}


def _nested(schema: Json, dims: Sequence[int]) -> Json:
    for dim in reversed(dims):
        schema = {"type": "array", "items": schema, **({"minItems": dim, "maxItems": dim} if dim >= 0 else {})}
    return schema


def _entry(config: ModelConfig, tensor: ModelInput | ModelOutput) -> Json:
    properties: Json = {
        "name": {"const": tensor.name},
        "datatype": {"const": _wire(tensor)},
        "shape": _shape(shape_of(config, tensor), config.max_batch_size),
    }
    if tensor.data_type not in NO_JSON_FORM:
        properties["data"] = {"$ref": COMPONENTS + _wire(tensor)}
    return {
        "title": tensor.name,
        "description": signature_text(config, tensor),
        "type": "object",
        "required": ["name", "shape", "datatype"],
        "properties": properties | {"parameters": {"$ref": COMPONENTS + "InputParameters"}},
    }


def _shape(shape: Sequence[int], batch_max: int) -> Json:
    size: Json = {"type": "integer", "minimum": 0}
    dims = [size if dim == -1 else {"const": dim} for dim in shape]
    if batch_max > 0:
        dims[0] = {"type": "integer", "minimum": 1, "maximum": batch_max}
    found: Json = {"type": "array", "items": size, "minItems": len(shape), "maxItems": len(shape)}
    return found | ({"prefixItems": dims} if dims else {})


def shared_schemas(datatypes: Sequence[DataType]) -> Json:
    """Return the schemas that others refer to."""
    return {datatype.wire: elements(datatype) for datatype in datatypes} | _SHARED


_UNSIGNED = {"type": "integer", "minimum": 0}

_SHARED: Json = {
    "Error": {
        "type": "object",
        "required": ["error"],
        "properties": {"error": {"type": "string", "description": "The problem, and what to do"}},
    },
    "Tensor": {
        "type": "object",
        "required": ["name", "shape", "datatype"],
        "properties": {
            "name": {"type": "string"},
            "shape": {"type": "array", "items": _UNSIGNED},
            "datatype": {"enum": [datatype.wire for datatype in DataType]},
            "data": {"type": "array", "items": {}},
            "parameters": {"type": "object"},
        },
    },
    "RequestParameters": {
        "type": "object",
        "description": "Parameters of the server; the model receives the others",
        "properties": {
            "sequence_id": {"type": ["integer", "string"]},
            "sequence_start": {"type": "boolean"},
            "sequence_end": {"type": "boolean"},
            "priority": _UNSIGNED,
            "timeout": {**_UNSIGNED, "description": "Longest time in the queue, in microseconds"},
            "binary_data_output": {"type": "boolean", "description": "Whether outputs are binary by default"},
        },
        "additionalProperties": {"type": ["string", "number", "boolean"]},
    },
    "InputParameters": {
        "type": "object",
        "properties": {
            "binary_data_size": {**_UNSIGNED, "description": "Size of the input's bytes, which follow the JSON"},
            "shared_memory_region": {"type": "string"},
            "shared_memory_offset": _UNSIGNED,
            "shared_memory_byte_size": _UNSIGNED,
        },
    },
    "OutputParameters": {
        "type": "object",
        "properties": {
            "binary_data": {"type": "boolean", "description": "Whether this output's bytes follow the JSON"},
            "classification": {**_UNSIGNED, "description": "Return this number of top classes instead of the tensor"},
            "shared_memory_region": {"type": "string"},
            "shared_memory_offset": _UNSIGNED,
            "shared_memory_byte_size": _UNSIGNED,
        },
    },
}


ELEMENTS_SHOWN_MAX = 1024
"""Most elements of all inputs together in an example; a longer one has only shapes and a value to fill them with."""

JSON_TYPE = "application/json"
BINARY_TYPE = "application/octet-stream"
EVENT_STREAM = "text/event-stream"

_MODEL = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
_ERROR = {
    "description": "The request failed",
    "content": {JSON_TYPE: {"schema": {"$ref": COMPONENTS + "Error"}}},
}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that is ready.

    Attributes:
        config: Its complete configuration.
        versions: Its ready versions.
        platform: What runs it, as metadata reports it.
    """

    config: ModelConfig
    versions: Sequence[str]
    platform: str


def openapi_document(
    server: ServerMetadata,
    models: Iterable[ServedModel],
    *,
    url: str,
    has_keys: bool,
    may_control: bool = False,
    has_openai: bool = True,
    metrics_port: int = 0,
) -> Json:
    """Return the document.

    Args:
        models: Its models that are ready.
        url: URL of the server, for code samples: `http://HOST:PORT`.
        has_keys: Whether the server requires API keys.
        may_control: Whether the reader may load and unload models.
        has_openai: Whether OpenAI's API is served.
        metrics_port: Port of the metrics endpoint, 0 for none.
    """
    served = sorted(models, key=lambda model: model.config.name)
    paths = dict(_SERVER_PATHS)
    requests = {
        model.config.name: replace(example_request(model.config, url=url), has_key=has_keys) for model in served
    }
    for model in served:
        paths |= _model_paths(model, requests[model.config.name])
    datatypes = {tensor.data_type for model in served for tensor in model.config.input}
    datatypes |= {output.data_type for model in served for output in model.config.output}
    named: Json = {}
    for model in served:
        named |= named_schemas(model.config)
    datatypes_used = [datatype for datatype in DataType if datatype in datatypes]
    document: Json = {
        "openapi": "3.1.0",
        "info": {
            "title": "Charonia",
            "version": server.version,
            "description": f"The server '{server.name}' and the models that it has loaded. KServe v2 protocol.",
        },
        "servers": [{"url": "."}],
        "tags": [*({"name": m.config.name, "description": _about(m)} for m in served), *_TAGS],
        "paths": paths,
        "components": {
            "schemas": shared_schemas(datatypes_used) | named,
        },
        "x-metrics-port": metrics_port,
        "x-model-control": may_control,
        "x-models": [_summary(model, requests[model.config.name], has_openai) for model in served],
    }
    if has_keys:
        document["components"] = {**_mapping(document["components"]), "securitySchemes": _SECURITY}
        document["security"] = [{"bearer": []}, {"header": []}]
    return document


def _summary(model: ServedModel, request: ExampleRequest, has_openai: bool) -> Json:
    config = model.config
    return {
        "name": config.name,
        "path": request.path,
        "versions": list(model.versions),
        "backend": config.backend or model.platform,
        "max_batch_size": config.max_batch_size,
        "batching": config.dynamic_batching is not None,
        "stream": config.is_decoupled,
        "openai": list(routes_of(config)) if has_openai else [],
        "sequence": config.sequence_batching is not None,
        "ensemble": [
            {"model": step.model_name, "takes": [*step.input_map.values()], "gives": [*step.output_map.values()]}
            for step in (config.ensemble_scheduling.step if config.ensemble_scheduling else ())
        ],
        "inputs": [_input_summary(config, tensor, request) for tensor in config.input if tensor.data_type is not None],
        "outputs": [_output_summary(config, output) for output in config.output],
        "samples": samples(request),
    }


def samples(request: ExampleRequest) -> list[Json]:
    """Return a request in several languages, as `x-codeSamples` has them."""
    written = (
        ("curl", "Shell", request.curl()),
        ("Python", "Python", request.python()),
        ("charonia infer", "Shell", request.infer_command()),
    )
    return [{"label": label, "lang": lang, "source": source.strip()} for label, lang, source in written if source]


def _input_summary(config: ModelConfig, model_input: ModelInput, request: ExampleRequest) -> Json:
    tensor = request.inputs.get(model_input.name)
    return {
        "name": model_input.name,
        "datatype": model_input.data_type.wire if model_input.data_type is not None else "",
        "shape": list(shape_of(config, model_input)),
        "optional": model_input.optional,
        "example": None if tensor is None else _example(tensor),
    }


def _output_summary(config: ModelConfig, output: ModelOutput) -> Json:
    return {
        "name": output.name,
        "datatype": output.data_type.wire if output.data_type is not None else "",
        "shape": list(shape_of(config, output)),
        "labels": bool(output.label_filename or labels_of(config, output.name)),
    }


def _example(tensor: Tensor) -> Json:
    """Return shape and elements; of a long tensor the first element, which stands for all."""
    shown = tensor.array
    if tensor.datatype is DataType.BF16:
        shown = (shown.astype(np.uint32) << 16).view(np.float32)
    is_short = shown.size <= ELEMENTS_SHOWN_MAX
    flat = shown.ravel().tolist()[: None if is_short else 1]
    if tensor.datatype is DataType.BYTES:
        flat = [element.decode(errors="replace") for element in flat]
    return {"shape": list(tensor.shape), "data" if is_short else "fill": flat if is_short else flat[0]}


def _model_paths(model: ServedModel, request: ExampleRequest) -> Json:
    config = model.config
    is_short = sum(prod(tensor.shape) for tensor in request.inputs.values()) <= ELEMENTS_SHOWN_MAX
    paths: Json = {f"/{request.path}/infer": {"post": _infer(config, request, is_short)}}
    if not any(model_input.data_type in NO_JSON_FORM for model_input in config.input):
        route = "generate_stream" if config.is_decoupled else "generate"
        body = request.generate_body() if is_short else None
        paths[f"/{request.path}/{route}"] = {"post": _generate(config, route, body)}
        own = route_of(config)
        if own is not None:
            paths[own[1]] = {**_mapping(paths.get(own[1])), own[0].lower(): _own_route(config, own, body)}
    return paths


_HEADERS: tuple[tuple[str, str, str, Json], ...] = (
    ("Inference-Header-Content-Length", "Length of the JSON if bytes follow it", "integer", {"minimum": 0}),
    (
        "Prefer",
        "`server-timing` requests the header Server-Timing: queue and computing time, batch size; "
        "`respond-async` the answer 202 with an address of the result",
        "string",
        {},
    ),
)


def _infer(config: ModelConfig, request: ExampleRequest, is_short: bool) -> Json:
    schema = infer_request(config)
    content: Json = {JSON_TYPE: _media(schema, request.infer_body() if is_short else None)}
    content[BINARY_TYPE] = {
        "schema": {
            "type": "string",
            "format": "binary",
            "description": "The JSON, whose length is in the header, followed by the bytes of the inputs with the "
            "parameter `binary_data_size`, in their order",
        }
    }
    answers: Json = {
        JSON_TYPE: {"schema": infer_response(config)},
        BINARY_TYPE: {"schema": {"type": "string", "format": "binary", "description": "If requested as binary"}},
    }
    if config.is_decoupled:
        answers = {EVENT_STREAM: {"schema": {"type": "string", "description": "An event `data: JSON` a response"}}}
    operation = _operation(config, "infer", "Inference", content, answers)
    operation["parameters"] = [
        {"name": name, "in": "header", "description": text, "schema": {"type": kind, **more}}
        for name, text, kind, more in _HEADERS
    ]
    operation["x-codeSamples"] = samples(request)
    return operation


def _generate(config: ModelConfig, route: str, body: Json | None) -> Json:
    content: Json = {JSON_TYPE: _media(generate_request(config), body)}
    answers: Json = {JSON_TYPE: {"schema": generate_response(config)}}
    if config.is_decoupled:
        answers = {EVENT_STREAM: {"schema": {"type": "string", "description": "An event `data: JSON` a response"}}}
    return _operation(config, route, "Inference with plain values by name", content, answers)


def _own_route(config: ModelConfig, route: tuple[str, str], body: Json | None) -> Json:
    operation = _generate(config, "call", body)
    answers = _mapping(_mapping(operation["responses"])["200"])
    if not config.is_decoupled:
        operation["responses"] = {
            "200": {**answers, "content": {JSON_TYPE: {"schema": bare_response(config)}}},
            "default": _ERROR,
        }
    if route[0] == "GET":
        schema = generate_request(config)
        required = schema["required"]
        assert isinstance(required, list)
        operation.pop("requestBody")
        operation["parameters"] = [
            {"name": name, "in": "query", "required": name in required, "schema": each}
            for name, each in _mapping(schema["properties"]).items()
            if name != "id"
        ]
    return operation


def _operation(config: ModelConfig, route: str, summary: str, content: Json, answers: Json) -> Json:
    return {
        "operationId": f"{route}:{config.name}",
        "summary": summary if not config.is_decoupled else f"{summary}, a stream of responses",
        "tags": [config.name],
        "requestBody": {"required": True, "content": content},
        "responses": {"200": {"description": "The outputs", "content": answers}, "default": _ERROR},
    }


def _media(schema: Json, example: Json | None) -> Json:
    return {"schema": schema} if example is None else {"schema": schema, "example": example}


def _about(model: ServedModel) -> str:
    config = model.config
    inputs = ", ".join(f"{tensor.name} {signature_text(config, tensor)}" for tensor in config.input)
    outputs = ", ".join(f"{output.name} {signature_text(config, output)}" for output in config.output)
    return f"{model.platform}: {inputs or 'no inputs'} -> {outputs or 'no outputs'}"


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def _get(tag: str, summary: str, *, of_model: bool = False, has_body: bool = True) -> Json:
    answer: Json = {"description": "OK"}
    if has_body:
        answer["content"] = {JSON_TYPE: {"schema": {}}}
    operation: Json = {"summary": summary, "tags": [tag], "responses": {"200": answer, "default": _ERROR}}
    return {"get": operation | ({"parameters": [_MODEL]} if of_model else {})}


def _post(summary: str, properties: Json, *, of_model: bool, tag: str = "Repository") -> Json:
    operation = _get(tag, summary, of_model=of_model, has_body=not of_model)["get"]
    body = {"content": {JSON_TYPE: {"schema": {"type": "object", "properties": properties}}}}
    return {"post": {**_mapping(operation), "requestBody": body}}


_TAGS = (
    {"name": "Models", "description": "State and metadata of a model"},
    {"name": "Server", "description": "The server itself"},
    {"name": "Repository", "description": "Models with their states; loading and unloading"},
)

_LOAD: Json = {
    "parameters": {
        "type": "object",
        "description": "`config`: a configuration as JSON text; `file:PATH`: a file's content in base64",
        "properties": {"config": {"type": "string"}},
        "patternProperties": {"^file:": {"type": "string", "contentEncoding": "base64"}},
        "additionalProperties": False,
    }
}
_UNLOAD: Json = {"parameters": {"type": "object", "properties": {"unload_dependents": {"type": "boolean"}}}}

_SERVER_PATHS: Json = {
    "/v2": _get("Server", "Name, version and extensions"),
    "/v2/health/live": _get("Server", "Whether the server answers", has_body=False),
    "/v2/health/ready": _get("Server", "Whether the server is ready", has_body=False),
    "/v2/models": _get("Server", "Names of the ready models"),
    "/v2/models/stats": _get("Server", "Statistics of all models"),
    "/v2/models/{model}": _get("Models", "Versions, inputs and outputs", of_model=True),
    "/v2/models/{model}/ready": _get("Models", "Whether a model is ready", of_model=True, has_body=False),
    "/v2/models/{model}/config": _get("Models", "The complete configuration", of_model=True),
    "/v2/models/{model}/stats": _get("Models", "Statistics", of_model=True),
    "/v2/models/{model}/explain": _get("Models", "What limits a model, and what to change", of_model=True),
    "/v2/repository/index": _post("Every model with its state", {"ready": {"type": "boolean"}}, of_model=False),
    "/v2/repository/models/{model}/load": _post("Load or reload a model", _LOAD, of_model=True),
    "/v2/repository/models/{model}/unload": _post("Unload a model", _UNLOAD, of_model=True),
}

_TRAFFIC: Json = {
    name: {"type": ["object", "null"]} if name in ("weights", "shadow", "canary") else {"type": ["string", "null"]}
    for name in ("weights", "sticky", "shadow", "canary", "action")
}

_RESULT: Json = {"parameters": [{**_MODEL, "name": "result"}]}

_SERVER_PATHS["/v2/results/{result}"] = {
    "get": {**_mapping(_get("Server", "The response to a request with `Prefer: respond-async`")["get"]), **_RESULT},
    "delete": {**_mapping(_get("Server", "Cancel such a request, or drop its result")["get"]), **_RESULT},
}

_SERVER_PATHS["/v2/models/{model}/traffic"] = {
    **_get("Models", "How requests without a version are split", of_model=True),
    **_post("Change how they are split", _TRAFFIC, of_model=True, tag="Models"),
    "delete": _get("Models", "Split them as configured", of_model=True)["get"],
}

_SECURITY: Json = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
