"""The OpenAPI document of the API."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

OPENAPI_PATH = "/api/openapi.json"

DESCRIPTION = """\
Models, environments and deployments. Calls name their caller with an API key, or with the session of a browser.
"""

PROBLEM = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {"type": "string", "description": "The problem: the thing, the expected and the received value."},
        "hint": {"type": "string", "description": "How to fix it."},
    },
}

_METHODS = frozenset({"get", "put", "post", "delete", "patch"})


def describe(app: FastAPI) -> None:
    """Let an application describe its API, including its errors."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = get_openapi(title=app.title, version=app.version, description=DESCRIPTION, routes=app.routes)
            app.openapi_schema = with_problems(found)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def with_problems(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document in which every call has the platform's error responses."""
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas["Problem"] = PROBLEM
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    for path in document["paths"].values():
        for method in path.keys() & _METHODS:
            responses = path[method]["responses"]
            responses.pop("422", None)
            responses["default"] = {"description": "An error.", "content": content}
    return document
