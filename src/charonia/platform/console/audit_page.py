"""The page with the audit log."""

import json
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Response

from charonia.platform.console.pages import ROWS_MAX, OnPage
from charonia.platform.people import audit
from charonia.platform.values import Number

router = APIRouter()

DONE: Mapping[str, str] = {
    "add": "added",
    "annotate": "described",
    "begin": "begun",
    "cancel": "cancelled",
    "change": "changed",
    "check": "checked again",
    "create": "created",
    "delete": "deleted",
    "link": "got a link to sign in",
    "perf": "started: load test",
    "rebuild": "built again",
    "remove": "removed",
    "retry": "tried again",
    "revoke": "revoked",
    "role": "got a role",
    "start": "started",
    "stop": "stopped",
    "traffic": "traffic changed",
    "try": "tried",
    "tune": "started: search for a configuration",
}
"""Past participles of the verbs of actions."""


@router.get("/p/{project}/audit")
def show(visit: OnPage, before: Number = 0) -> Response:
    """Show the audit log."""
    with visit.platform.database.reading() as session:
        project = visit.project if visit.who.everywhere is None else ""
        found = audit.entries(session, visit.who, project=project, before=before, limit=ROWS_MAX + 1)
    entries = [
        {
            "action_text": action_text(row.action),
            "subject": row.subject,
            "detail": detail_text(row.detail),
            "who": row.who,
            "address": row.address,
            "created": row.created,
        }
        for row in found[:ROWS_MAX]
    ]
    after = f"?before={found[ROWS_MAX - 1].id}" if len(found) > ROWS_MAX else ""
    pages = {"before": visit.path("audit") if before else "", "after": after}
    return visit.show("audit.html", {"entries": entries, "pages": pages})


def action_text(action: str) -> str:
    """Return an action as a sentence: "Deployment changed"."""
    noun, _, verb = action.rpartition(".")
    return f"{noun.replace('.', ' ').capitalize()} {DONE.get(verb, verb)}"


def detail_text(detail: Mapping[str, Any]) -> str:
    """Return the details of an entry in one line."""
    parts = []
    for name, value in detail.items():
        shown = "; ".join(map(str, value)) if isinstance(value, list) else value
        if isinstance(shown, dict):
            shown = json.dumps(shown)
        if shown not in ("", None, 0):
            parts.append(f"{name.replace('_', ' ')}: {shown}")
    return ", ".join(parts)
