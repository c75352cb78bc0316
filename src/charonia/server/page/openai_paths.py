"""The routes of OpenAI's API in the OpenAPI document. Pure."""

from collections.abc import Iterable

from charonia.config.model import ModelConfig
from charonia.server.page.json_schemas import Json
from charonia.wire.openai_models import CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, model_ids, routes_of

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
_ERROR: Json = {
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
    paths: Json = {f"/v1/{route}": {"post": _operation(route, ids)} for route, ids in by_route.items()}
    if paths:
        listed: Json = {"description": "OK", "content": {"application/json": {"schema": {}}}}
        answers: Json = {"200": listed, "default": _ERROR}
        paths["/v1/models"] = {"get": {"summary": "The models of this API", "tags": [TAG], "responses": answers}}
    return paths


def _operation(route: str, ids: list[str]) -> Json:
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
        "responses": {"200": {"description": "The answer", "content": answers}, "default": _ERROR},
    }
