"""Servers against their own OpenAPI documents, by cases that schemathesis makes of them."""

import json
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

import schemathesis
from schemathesis import engine
from schemathesis.config import SchemathesisConfig
from schemathesis.engine.events import FatalError, NonFatalError, ScenarioFinished
from schemathesis.schemas import BaseSchema

EXAMPLES = 3
"""Random cases of each operation, beside those that cover the bounds of each parameter and undeclared methods."""


Load = Callable[[SchemathesisConfig], BaseSchema]


def of_app(path: str, app: Any) -> Load:
    """Return what loads the document of an ASGI application, which is then called without a socket."""
    return lambda config: schemathesis.openapi.from_asgi(path, app, config=config)


def of_server(url: str) -> Load:
    """Return what loads `/openapi.json` of a server.

    The lengths of shapes are left out: schemathesis turns `prefixItems` into what its own check of answers refuses.
    """

    def load(config: SchemathesisConfig) -> BaseSchema:
        with urllib.request.urlopen(f"{url}/openapi.json") as answer:
            document = json.load(answer, object_hook=_without_prefixes)
        loaded = schemathesis.openapi.from_dict(document, config=config)
        loaded.config.update(base_url=url)
        return loaded

    return load


def _without_prefixes(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name != "prefixItems"}


def unlike_its_document(
    load: Load, headers: dict[str, str], *, operations: Sequence[dict[str, Any]] = (), **checks: dict[str, Any]
) -> str:
    """Return what a server answers otherwise than its document says, a paragraph each; "" for nothing.

    Args:
        headers: What calls are sent with; some are also sent without.
        operations: Settings of single operations, as the configuration of schemathesis has them.
        checks: Settings of checks, as the configuration of schemathesis has them.
    """
    config = SchemathesisConfig.from_dict(
        {
            "seed": 1,
            "continue-on-failure": True,
            "headers": headers,
            "checks": checks,
            "operations": list(operations),
            "generation": {"max-examples": EXAMPLES, "deterministic": True, "no-shrink": True, "database": "none"},
            "phases": {"stateful": {"enabled": False}},
        }
    )
    document = load(config)
    found: dict[str, str] = {}
    count = 0
    for event in engine.from_schema(document).execute():
        if isinstance(event, FatalError | NonFatalError):
            error = event.value if isinstance(event, NonFatalError) else event.exception
            found[f"error in {getattr(event, 'label', '')}"] = f"{error!r}"
        if isinstance(event, ScenarioFinished):
            for nodes in event.recorder.checks.values():
                count += len(nodes)
                for node in nodes:
                    if node.failure_info is not None:
                        failure = node.failure_info.failure
                        found.setdefault(
                            f"{failure.operation}: {failure.title}", f"{failure}\n{node.failure_info.code_sample}"
                        )
    assert count, "no case was sent"
    return "\n\n".join(f"{what}: {details}" for what, details in sorted(found.items()))
