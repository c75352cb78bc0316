"""Servers against their own OpenAPI documents, by cases that schemathesis makes of them."""

from typing import Any

import schemathesis
from schemathesis import engine
from schemathesis.config import SchemathesisConfig
from schemathesis.engine.events import FatalError, NonFatalError, ScenarioFinished

EXAMPLES = 6
"""Random cases of each operation, beside those that cover the bounds of each parameter and undeclared methods."""


def unlike_its_document(path: str, app: Any, headers: dict[str, str], **checks: dict[str, Any]) -> str:
    """Return what an ASGI application answers otherwise than its document says, a paragraph each; "" for nothing.

    Args:
        path: Of the document.
        app: The application.
        headers: What calls are sent with; some are also sent without.
        checks: Settings of checks, as the configuration of schemathesis has them.
    """
    config = SchemathesisConfig.from_dict(
        {
            "seed": 1,
            "continue-on-failure": True,
            "headers": headers,
            "checks": checks,
            "generation": {"max-examples": EXAMPLES, "deterministic": True, "no-shrink": True, "database": "none"},
            "phases": {"stateful": {"enabled": False}},
        }
    )
    document = schemathesis.openapi.from_asgi(path, app, config=config)
    found: dict[str, str] = {}
    count = 0
    for event in engine.from_schema(document).execute():
        if isinstance(event, FatalError | NonFatalError):
            found[str(event)] = str(event.info if isinstance(event, NonFatalError) else event.exception)
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
