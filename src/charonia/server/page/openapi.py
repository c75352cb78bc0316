"""The OpenAPI document of the loaded models. Pure.

Each model has its own paths for inference, with the names and datatypes of its tensors and an example that its server
accepts; all else is described once. `x-models` has the content of the page that does not fit OpenAPI;
`x-codeSamples`, which other viewers read too, has the same request in several languages.

Source: OpenAPI Specification 3.1.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from charonia.config.model import ModelConfig, ModelInput, ModelOutput
from charonia.config.parameters import route_of
from charonia.core.dtypes import DataType
from charonia.core.metadata import ServerMetadata
from charonia.core.tensor import Tensor
from charonia.server.page import json_schemas
from charonia.server.page.json_schemas import COMPONENTS, NO_JSON_FORM, Json
from charonia.wire.example_request import ExampleRequest, example_request
from charonia.wire.openai_models import CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, model_ids, routes_of
from charonia.wire.plain_values import labels_of

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

TAG = "OpenAI's API"

_TEXT_OR_TOKENS: Json = {"description": "Text, tokens, or an array of either"}
_MESSAGES: Json = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {"role": {"type": "string"}, "content": {"description": "Text, or an array of parts"}},
    },
}
_STREAM: Json = {"type": "boolean", "default": False}
_ROUTES: dict[str, tuple[str, str, Json]] = {
    CHAT: ("Answer a conversation", "messages", {"messages": _MESSAGES, "stream": _STREAM}),
    COMPLETIONS: ("Continue text", "prompt", {"prompt": _TEXT_OR_TOKENS, "stream": _STREAM}),
    EMBEDDINGS: ("Make vectors of texts", "input", {"input": _TEXT_OR_TOKENS}),
    RESPONSES: ("Answer as a response", "input", {"input": {}, "stream": _STREAM}),
}
_EXAMPLES: dict[str, object] = {
    CHAT: [{"role": "user", "content": "Name three moons."}],
    COMPLETIONS: "Three moons are",
    EMBEDDINGS: "Name three moons.",
    RESPONSES: "Name three moons.",
}
_OPENAI_ERROR: Json = {
    "description": "The request failed",
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "properties": {
                    "error": {
                        "type": "object",
                        "properties": {
                            "message": {"type": "string"},
                            "type": {"type": "string"},
                            "param": {"type": ["string", "null"]},
                            "code": {"type": ["string", "null"]},
                        },
                    }
                },
            }
        }
    },
}


def openai_paths(models: Iterable[ModelConfig]) -> Json:
    """Return the paths of the routes that one of the models answers; none where none does."""
    by_route: dict[str, list[str]] = {}
    for config in models:
        for route in routes_of(config):
            by_route.setdefault(route, []).extend(model_ids(config))
    paths: Json = {f"/v1/{route}": {"post": _openai_operation(route, ids)} for route, ids in by_route.items()}
    if paths:
        listed: Json = {"description": "OK", "content": {"application/json": {"schema": {}}}}
        answers: Json = {"200": listed, "default": _OPENAI_ERROR}
        paths["/v1/models"] = {"get": {"summary": "The models of this API", "tags": [TAG], "responses": answers}}
    return paths


def _openai_operation(route: str, ids: list[str]) -> Json:
    summary, member, properties = _ROUTES[route]
    schema: Json = {
        "type": "object",
        "required": ["model", member],
        "properties": {"model": {"type": "string", "enum": ids}, **properties},
        "additionalProperties": True,
    }
    answers: Json = {"application/json": {"schema": {"type": "object"}}}
    if "stream" in properties:
        answers["text/event-stream"] = {"schema": {"type": "string", "description": "An event `data: JSON` a chunk"}}
    body = {"schema": schema, "example": {"model": ids[0], member: _EXAMPLES[route]}}
    return {
        "operationId": route.replace("/", "_"),
        "summary": summary,
        "tags": [TAG],
        "requestBody": {"required": True, "content": {"application/json": body}},
        "responses": {"200": {"description": "The answer", "content": answers}, "default": _OPENAI_ERROR},
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
) -> Json:
    """Return the document.

    Args:
        models: Its models that are ready.
        url: URL of the server, for code samples: `http://HOST:PORT`.
        has_keys: Whether the server requires API keys.
        may_control: Whether the reader may load and unload models.
        has_openai: Whether OpenAI's API is served.
    """
    served = sorted(models, key=lambda model: model.config.name)
    paths = dict(_SERVER_PATHS)
    requests = {model.config.name: _example_request(model.config, url, has_keys) for model in served}
    for model in served:
        paths |= _model_paths(model, requests[model.config.name])
    paths |= openai_paths(model.config for model in served) if has_openai else {}
    datatypes = {given.data_type for model in served for given in model.config.input}
    datatypes |= {output.data_type for model in served for output in model.config.output}
    named: Json = {}
    for model in served:
        named |= json_schemas.named_schemas(model.config)
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
            "schemas": json_schemas.shared_schemas(datatypes_used) | named,
        },
        "x-model-control": may_control,
        "x-models": [_summary(model, requests[model.config.name], has_openai) for model in served],
    }
    if has_keys:
        document["components"] = {**_mapping(document["components"]), "securitySchemes": _SECURITY}
        document["security"] = [{"bearer": []}, {"header": []}]
    return document


def _example_request(config: ModelConfig, url: str, has_keys: bool) -> ExampleRequest:
    return replace(example_request(config, url=url), has_key=has_keys)


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
        "ensemble": [step.model_name for step in config.ensemble_scheduling.step] if config.ensemble_scheduling else [],
        "inputs": [_input_summary(config, given, request) for given in config.input if given.data_type is not None],
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


def _input_summary(config: ModelConfig, given: ModelInput, request: ExampleRequest) -> Json:
    tensor = request.inputs.get(given.name)
    return {
        "name": given.name,
        "datatype": given.data_type.wire if given.data_type is not None else "",
        "shape": list(json_schemas.shape_of(config, given)),
        "optional": given.optional,
        "example": None if tensor is None else _example(tensor),
    }


def _output_summary(config: ModelConfig, output: ModelOutput) -> Json:
    return {
        "name": output.name,
        "datatype": output.data_type.wire if output.data_type is not None else "",
        "shape": list(json_schemas.shape_of(config, output)),
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
    if not any(given.data_type in NO_JSON_FORM for given in config.input):
        route = "generate_stream" if config.is_decoupled else "generate"
        body = request.generate_body() if is_short else None
        paths[f"/{request.path}/{route}"] = {"post": _generate(config, route, body)}
        own = route_of(config)
        if own is not None:
            paths[own[1]] = {**_mapping(paths.get(own[1])), own[0].lower(): _own_route(config, own, body)}
    return paths


def _infer(config: ModelConfig, request: ExampleRequest, is_short: bool) -> Json:
    schema = json_schemas.infer_request(config)
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
        JSON_TYPE: {"schema": json_schemas.infer_response(config)},
        BINARY_TYPE: {"schema": {"type": "string", "format": "binary", "description": "If requested as binary"}},
    }
    if config.is_decoupled:
        answers = {EVENT_STREAM: {"schema": {"type": "string", "description": "An event `data: JSON` a response"}}}
    operation = _operation(config, "infer", "Inference", content, answers)
    operation["parameters"] = [
        {
            "name": "Inference-Header-Content-Length",
            "in": "header",
            "description": "Length of the JSON if bytes follow it",
            "schema": {"type": "integer", "minimum": 0},
        },
        {
            "name": "Prefer",
            "in": "header",
            "description": "`server-timing` requests the header Server-Timing: queue and computing time, batch size; "
            "`respond-async` the answer 202 with an address of the result",
            "schema": {"type": "string"},
        },
    ]
    operation["x-codeSamples"] = samples(request)
    return operation


def _generate(config: ModelConfig, route: str, body: Json | None) -> Json:
    content: Json = {JSON_TYPE: _media(json_schemas.generate_request(config), body)}
    answers: Json = {JSON_TYPE: {"schema": json_schemas.generate_response(config)}}
    if config.is_decoupled:
        answers = {EVENT_STREAM: {"schema": {"type": "string", "description": "An event `data: JSON` a response"}}}
    return _operation(config, route, "Inference with plain values by name", content, answers)


def _own_route(config: ModelConfig, route: tuple[str, str], body: Json | None) -> Json:
    operation = _generate(config, "call", body)
    answers = _mapping(_mapping(operation["responses"])["200"])
    if not config.is_decoupled:
        operation["responses"] = {
            "200": {**answers, "content": {JSON_TYPE: {"schema": json_schemas.bare_response(config)}}},
            "default": _ERROR,
        }
    if route[0] == "GET":
        schema = json_schemas.generate_request(config)
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
    inputs = ", ".join(f"{given.name} {json_schemas.signature_text(config, given)}" for given in config.input)
    outputs = ", ".join(f"{output.name} {json_schemas.signature_text(config, output)}" for output in config.output)
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
    {"name": TAG, "description": "For OpenAI's clients, with the models that answer it"},
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
