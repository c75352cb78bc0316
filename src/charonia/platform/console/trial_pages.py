"""The page to try a version before it is deployed, and the requests of the form to try a model.

The requests are passed to the server of a deployment or of a version, within limits, and only for users of the page:
clients call the deployment at its own address.
"""

import re
from collections.abc import Callable, Mapping
from http import HTTPMethod
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from charonia.core.errors import ServingError, not_found, unavailable
from charonia.http_call import NO_ANSWER, http_call, no_answer_reason
from charonia.platform.console.deploy_form import text_of
from charonia.platform.console.environment_pages import suggested
from charonia.platform.console.pages import INVALID, OnPage, PageContext, Sent, go, problems_of
from charonia.platform.environments import catalog
from charonia.platform.models import registry
from charonia.platform.people import projects
from charonia.platform.people.access import ProjectRole
from charonia.platform.trials import IDLE_S_MAX, START_S_MAX, TrialPhase
from charonia.platform.values import Number, Text

router = APIRouter(prefix="/p/{project}", include_in_schema=False)

_TRY = "/models/{name}/versions/{number}/try"

ENVIRONMENTS_MAX = 200
REQUEST_BYTES_MAX = 64 * 2**20
ANSWER_BYTES_MAX = 64 * 2**20
ANSWER_S_MAX = 60.0

_METHODS: list[str] = [HTTPMethod.GET, HTTPMethod.POST]

_CALLS = re.compile(r"openapi\.json|samples/[^/]+(/versions/\d+)?|v2/models/[^/]+(/versions/\d+)?/infer")
"""The permitted paths."""

_PASSED = ("content-type", "accept", "prefer", "inference-header-content-length")
_RETURNED = ("content-type", "server-timing", "inference-header-content-length")


@router.get(_TRY)
def show(visit: OnPage, name: Text, number: Number) -> Response:
    return _page(visit, name, number)


@router.post(_TRY + "/start")
def start(visit: OnPage, name: Text, number: Number, sent: Sent) -> Response:
    """Start the server of a version."""
    try:
        visit.platform.trials.start(visit.who, visit.project, name, number, text_of(sent, "environment"))
    except ServingError as error:
        if visit.request.headers.get("hx-target") != "form":  # a button of another page
            raise
        return _page(
            visit, name, number, status=INVALID, problems=problems_of(error, {"environment": "environment"}.get)
        )
    return go(visit.path("models", name, "versions", number, "try"))


@router.post(_TRY + "/stop")
def stop(visit: OnPage, name: Text, number: Number) -> Response:
    """Stop the server of a version."""
    visit.platform.trials.stop(visit.who, visit.project, name, number)
    return go(visit.path("models", name, "versions", number, "try"))


def _page(visit: PageContext, name: str, number: int, *, status: int = 200, **values: Any) -> Response:
    with visit.platform.database.reading() as session:
        version = registry.version(session, visit.who, visit.project, name, number)
        environments = catalog.page(session, projects.find(session, visit.who, visit.project), limit=ENVIRONMENTS_MAX)
    trial, log = visit.platform.trials.state(visit.who, visit.project, name, number)
    ready = [(row.name, row.name) for row in environments if row.state == "ready"]
    context = {
        "name": name,
        "number": number,
        "state": version.state,
        "runs_code": version.runs_code,
        "environments": [("", "the platform's own Python"), *ready],
        "environment": suggested(version.report, environments),
        "trial": trial,
        "log": log,
        "start_s_max": START_S_MAX,
        "idle_s_max": IDLE_S_MAX,
        "base": visit.path("models", name, "versions", number),
    }
    response = visit.show(
        "version_try.html", {**context, **values}, block="form" if status != 200 else "", status=status
    )
    if visit.request.headers.get("hx-target") == "live" and trial.phase is not TrialPhase.STARTING:
        response.headers["HX-Trigger"] = "renew"  # the form of a server that has become ready needs its script
    return response


@router.api_route("/deployments/{name}/server/{path:path}", methods=_METHODS)
async def ask_deployment(visit: OnPage, request: Request, name: Text, path: Text) -> Response:
    """Pass a request to the server of a deployment."""

    def find() -> tuple[str, str]:
        visit.who.demand(ProjectRole.DEPLOYER, visit.project)
        seen = visit.platform.deployments.servers.observe(visit.who, visit.project, name)
        if not seen.http:
            raise unavailable(f"deployment '{name}' does not run", hint="start it, or wait until it is ready")
        return seen.http, seen.key

    return await _pass(request, path, find)


@router.api_route("/models/{name}/versions/{number}/server/{path:path}", methods=_METHODS)
async def ask_version(visit: OnPage, request: Request, name: Text, number: Number, path: Text) -> Response:
    """Pass a request to the server of a trial."""
    return await _pass(request, path, lambda: visit.platform.trials.use(visit.who, visit.project, name, number))


async def _pass(request: Request, path: str, find: Callable[[], tuple[str, str]]) -> Response:
    """Pass a request to a server.

    Args:
        find: Returns the address of the server and a key for it, unless the caller may not have them.
    """
    if _CALLS.fullmatch(path) is None:
        raise not_found(f"'{path}' does not exist for the form to try a model")
    address, key = await run_in_threadpool(find)
    if int(request.headers.get("content-length", 0)) > REQUEST_BYTES_MAX:
        return _too_large()
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > REQUEST_BYTES_MAX:
            return _too_large()
    headers = {name: value for name in _PASSED if (value := request.headers.get(name))}
    if key:
        headers["X-Api-Key"] = key  # a proxy takes `Authorization` for itself
    sent = body if request.method == HTTPMethod.POST else None
    return await run_in_threadpool(_answer, request.method, f"{address}/{quote(path)}", headers, sent)


def _answer(method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> Response:
    try:
        answer = http_call(method, url, headers, body, timeout_s=ANSWER_S_MAX, bytes_max=ANSWER_BYTES_MAX)
    except NO_ANSWER as error:
        raise unavailable(f"the server does not answer: {no_answer_reason(error)}") from None
    returned = {key: value for key in _RETURNED if (value := answer.headers.get(key))}
    return Response(answer.body, answer.status, returned)


def _too_large() -> Response:
    return Response(
        f'{{"error": "the form sends at most {REQUEST_BYTES_MAX >> 20} MiB"}}', 413, media_type="application/json"
    )
