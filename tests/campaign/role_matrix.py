"""Each call of the platform's API, by each role, in its own and in another project, with the status that it must have.

Things that calls name are not there, so a call that is permitted ends with 404 unless it lists or creates something. A
call that is not permitted has to be refused before that: its status must not tell whether the thing exists.
"""

import itertools
import json
import random
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from fastapi.testclient import TestClient
from tests.campaign.figures import Context, Figures

from charonia.platform.app import make_app
from charonia.platform.serve import prepare_owner
from charonia.platform.settings import PlatformSettings

OWN, OTHER = "own", "other"


class Least(IntEnum):
    """The least role for a call. Each may do what those before it may."""

    ANYBODY = 0  # everybody with a key, in any project
    VIEWER = 1
    DEPLOYER = 2
    CODE = 3  # a deployer who may add and deploy models that hold code
    ADMIN = 4
    OWNER = 5  # the administrator of all projects


ROLES: Mapping[str, Least] = {
    "viewer": Least.VIEWER,
    "deployer": Least.DEPLOYER,
    "deployer with code": Least.CODE,
    "admin": Least.ADMIN,
}
"""Callers with a role in the project `OWN`, beside the owner and somebody without a key."""


@dataclass(frozen=True, slots=True)
class Call:
    """What is expected of a call.

    Attributes:
        body: Its body; a text `UNIQUE` in it becomes another name each time.
    """

    least: Least
    status: int
    body: object = None


UNIQUE = "unique"
SPEC = {"models": [{"name": "missing", "versions": [1]}]}
P, M, D, E = "/api/v1/projects/{project}", "/models/{model}", "/deployments/{name}", "/environments/{name}"

CALLS: Mapping[str, Call] = {
    "GET /api/v1/me": Call(Least.ANYBODY, 200),
    "GET /api/v1/projects": Call(Least.ANYBODY, 200),
    "POST /api/v1/projects": Call(Least.OWNER, 201, {"name": UNIQUE}),
    "GET /api/v1/keys": Call(Least.ADMIN, 200),
    "POST /api/v1/keys": Call(
        Least.ADMIN, 201, {"name": UNIQUE, "roles": [{"role": "viewer", "project": "{project}"}]}
    ),
    "DELETE /api/v1/keys/{name}": Call(Least.ADMIN, 404),
    "GET /api/v1/users": Call(Least.ADMIN, 200),
    "POST /api/v1/users": Call(Least.OWNER, 201, {"name": UNIQUE}),
    "POST /api/v1/users/{id}/link": Call(Least.OWNER, 404),
    "PUT /api/v1/users/{id}/role": Call(Least.ADMIN, 404, {"role": "viewer", "project": "{project}"}),
    "DELETE /api/v1/users/{id}": Call(Least.OWNER, 404),
    "GET /api/v1/audit": Call(Least.ANYBODY, 200),
    f"GET {P}/models": Call(Least.VIEWER, 200),
    f"POST {P}/models": Call(Least.DEPLOYER, 201, {"name": UNIQUE}),
    f"GET {P}{M}": Call(Least.VIEWER, 404),
    f"PATCH {P}{M}": Call(Least.DEPLOYER, 404, {"owner": "me"}),
    f"DELETE {P}{M}": Call(Least.DEPLOYER, 404),
    f"POST {P}{M}/versions": Call(Least.DEPLOYER, 404, {"source": {"kind": "upload", "place": "missing"}}),
    f"GET {P}{M}/versions/{{number}}": Call(Least.VIEWER, 404),
    f"PATCH {P}{M}/versions/{{number}}": Call(Least.DEPLOYER, 404, {"notes": "mine"}),
    f"DELETE {P}{M}/versions/{{number}}": Call(Least.DEPLOYER, 404),
    f"POST {P}{M}/versions/{{number}}/check": Call(Least.DEPLOYER, 404),
    f"GET {P}{M}/versions/{{number}}/difference": Call(Least.VIEWER, 404),
    f"GET {P}{M}/versions/{{number}}/files/{{path}}": Call(Least.VIEWER, 404),
    f"GET {P}{M}/found": Call(Least.VIEWER, 200),
    f"GET {P}/follows": Call(Least.VIEWER, 200),
    f"GET {P}{M}/follow": Call(Least.VIEWER, 404),
    f"PUT {P}{M}/follow": Call(Least.DEPLOYER, 404, {"place": "git@h.org:g/r.git", "hook": "missing"}),
    f"DELETE {P}{M}/follow": Call(Least.DEPLOYER, 404),
    f"POST {P}/uploads": Call(Least.DEPLOYER, 201, {"files": [{"path": "a.onnx", "size": 1}]}),
    f"GET {P}/uploads": Call(Least.DEPLOYER, 404),
    f"DELETE {P}/uploads": Call(Least.DEPLOYER, 404),
    f"GET {P}/uploads/{{key}}": Call(Least.DEPLOYER, 404),
    f"PUT {P}/uploads/{{key}}": Call(Least.DEPLOYER, 404, b"x"),
    "GET /api/v1/environments/choices": Call(Least.ANYBODY, 200),
    f"GET {P}/environments": Call(Least.VIEWER, 200),
    f"POST {P}/environments": Call(Least.CODE, 202, {"name": UNIQUE, "requirements": ""}),
    f"GET {P}{E}": Call(Least.VIEWER, 404),
    f"DELETE {P}{E}": Call(Least.DEPLOYER, 404),
    f"POST {P}{E}/rebuild": Call(Least.CODE, 404),
    f"GET {P}/secrets": Call(Least.DEPLOYER, 200),
    f"PUT {P}/secrets/{{name}}": Call(Least.DEPLOYER, 400, {"value": ""}),
    f"DELETE {P}/secrets/{{name}}": Call(Least.DEPLOYER, 404),
    f"GET {P}/alerts": Call(Least.VIEWER, 200),
    f"POST {P}/alerts": Call(
        Least.DEPLOYER, 404, {"name": UNIQUE, "condition": "disk", "threshold": 1.0, "secret": "missing"}
    ),
    f"DELETE {P}/alerts/{{name}}": Call(Least.DEPLOYER, 404),
    f"POST {P}/alerts/{{name}}/test": Call(Least.DEPLOYER, 404),
    f"GET {P}/alert-events": Call(Least.VIEWER, 200),
    f"POST {P}/alert-events/{{number}}/acknowledge": Call(Least.DEPLOYER, 404),
    f"GET {P}/deployments": Call(Least.VIEWER, 200),
    f"POST {P}/deployments": Call(Least.DEPLOYER, 400, {"name": UNIQUE, **SPEC}),
    f"GET {P}{D}": Call(Least.VIEWER, 404),
    f"PUT {P}{D}": Call(Least.DEPLOYER, 400, SPEC),
    f"DELETE {P}{D}": Call(Least.DEPLOYER, 404),
    f"POST {P}{D}/rollback": Call(Least.DEPLOYER, 404, {"to": 1}),
    f"POST {P}{D}/stop": Call(Least.DEPLOYER, 404),
    f"POST {P}{D}/start": Call(Least.DEPLOYER, 404),
    f"GET {P}{D}/revisions": Call(Least.VIEWER, 404),
    f"GET {P}{D}/revisions/{{number}}": Call(Least.VIEWER, 404),
    f"GET {P}{D}/revisions/{{number}}/diff": Call(Least.VIEWER, 404),
    f"GET {P}{D}/figures": Call(Least.VIEWER, 404),
    f"GET {P}{D}/log": Call(Least.VIEWER, 404),
    f"GET {P}{D}/explain": Call(Least.VIEWER, 404),
    f"GET {P}{D}/traffic": Call(Least.VIEWER, 404),
    f"POST {P}{D}/traffic": Call(Least.DEPLOYER, 404, {"model": "missing", "weights": {"1": 1}}),
    f"GET {P}{D}/keys": Call(Least.DEPLOYER, 404),
    f"POST {P}{D}/keys": Call(Least.DEPLOYER, 404, {"name": UNIQUE}),
    f"DELETE {P}{D}/keys/{{key}}": Call(Least.DEPLOYER, 404),
    f"POST {P}/jobs/perf": Call(Least.DEPLOYER, 404, {"deployment": "missing", "model": "missing"}),
    f"POST {P}/jobs/tune": Call(Least.DEPLOYER, 400, {"model": "missing", "version": 1}),
    f"GET {P}/tasks": Call(Least.VIEWER, 200),
    "GET /api/v1/tasks/{number}": Call(Least.ANYBODY, 404),
    "GET /api/v1/tasks/{number}/log": Call(Least.ANYBODY, 404),
    "POST /api/v1/tasks/{number}/cancel": Call(Least.ANYBODY, 404),
    "GET /api/v1/tasks/{number}/files/{name}": Call(Least.ANYBODY, 404),
}

QUERY = {"model": "missing", "to": "1", "from": "1", "batch": "0" * 32, "version": "1"}


def expected(call: Call, path: str, role: Least | None, project: str) -> int:
    """Return the status that a call must have.

    Args:
        role: The caller's role in their project, None for no key.
    """
    if role is None:
        return 401
    is_bound = "{project}" in path or "{project}" in json.dumps(call.body if not isinstance(call.body, bytes) else "")
    if is_bound and project == OTHER and role is not Least.OWNER:
        return 403
    return call.status if role >= call.least else 403


def run(context: Context) -> Figures:
    """Make all calls as everybody, or so many of them as the campaign asks for."""
    figures = Figures()
    with _platform(context) as (client, keys):
        document = client.get("/api/openapi.json").json()
        found = {
            f"{method.upper()} {path}"
            for path, methods in document["paths"].items()
            for method in methods
            if path.startswith("/api/")
        }
        for each in sorted(found ^ CALLS.keys()):
            figures.found(f"{each}: expected the same calls in the table and in the OpenAPI document")
        made = list(itertools.product(sorted(found & CALLS.keys()), keys, (OWN, OTHER)))
        if len(made) > context.requests:
            made = random.Random(context.seed).sample(made, context.requests)
        for number, (name, who, project) in enumerate(made):
            call = CALLS[name]
            method, path = name.split(" ")
            role, key = keys[who]
            status, text = _send(client, method, path, call, key, project, f"name-{number}")
            figures.counts["calls"] += 1
            figures.counts[f"with {status}"] += 1
            right = expected(call, path, role, project)
            if status != right:
                figures.found(f"{name} by {who}, project {project}: expected {right}, got {status}: {text[:200]}")
    return figures


def _send(
    client: TestClient, method: str, path: str, call: Call, key: str, project: str, unique: str
) -> tuple[int, str]:
    values = {"project": project, "number": "999999", "id": "999999", "path": "1/model.onnx", "key": "0" * 32}
    filled = re.sub(r"\{(\w+)(?::path)?\}", lambda part: values.get(part[1], "missing"), path)
    more: dict[str, Any] = {}
    if isinstance(call.body, bytes):
        more = {"content": call.body, "params": {**QUERY, "offset": "0"}}
    elif call.body is not None:
        more = {"json": json.loads(json.dumps(call.body).replace("{project}", project).replace(UNIQUE, unique))}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    answer = client.request(method, filled, headers=headers, **{"params": QUERY, **more})
    return answer.status_code, answer.text


@contextmanager
def _platform(context: Context) -> Iterator[tuple[TestClient, dict[str, tuple[Least | None, str]]]]:
    """Yield a client of a platform that carries out nothing, and everybody's role and key by name."""
    app = make_app(PlatformSettings(context.folder, isolation="available"))
    platform = app.state.platform
    with platform.database.transaction() as session:
        prepare_owner(session, context.folder)
    owner = (context.folder / "owner.key").read_text().strip()
    with TestClient(app, base_url="http://127.0.0.1:8080", follow_redirects=False) as client:
        platform.tasks.close()  # what waits goes on waiting
        platform.deployments.close()
        headers = {"Authorization": f"Bearer {owner}"}
        keys: dict[str, tuple[Least | None, str]] = {"nobody": (None, ""), "owner": (Least.OWNER, owner)}
        for project in (OWN, OTHER):
            client.post("/api/v1/projects", json={"name": project}, headers=headers).raise_for_status()
        for name, least in ROLES.items():
            role = {"role": name.split(" ")[0], "project": OWN, "may_run_code": least >= Least.CODE}
            body = {"name": name.replace(" ", "-"), "roles": [role]}
            answer = client.post("/api/v1/keys", json=body, headers=headers)
            answer.raise_for_status()
            keys[name] = least, answer.json()["key"]
        yield client, keys
