"""Requests of the form to try a model: passed to the server of a deployment or of a version, within limits.

For people at the page only. Clients call the deployment at its own address.
"""

import http.client
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from http import HTTPMethod
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from charonia.core.errors import not_found, unavailable
from charonia.platform.console.pages import OnPage
from charonia.platform.people.access import ProjectRole
from charonia.platform.values import Number, Text

router = APIRouter(prefix="/p/{project}")

REQUEST_BYTES_MAX = 64 * 2**20
ANSWER_BYTES_MAX = 64 * 2**20
ANSWER_S_MAX = 60.0

_METHODS: list[str] = [HTTPMethod.GET, HTTPMethod.POST]

_CALLS = re.compile(r"openapi\.json|samples/[^/]+(/versions/\d+)?|v2/models/[^/]+(/versions/\d+)?/infer")
"""What may be asked for."""

_PASSED = ("content-type", "accept", "prefer", "inference-header-content-length")
_RETURNED = ("content-type", "server-timing", "inference-header-content-length")


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
    """Pass a request to the server that was started to try a version."""
    return await _pass(request, path, lambda: visit.platform.trials.use(visit.who, visit.project, name, number))


async def _pass(request: Request, path: str, find: Callable[[], tuple[str, str]]) -> Response:
    """Pass a request to a server.

    Args:
        request: The request.
        path: What it asks for.
        find: Returns the address of the server and a key for it, unless the caller may not have them.
    """
    if _CALLS.fullmatch(path) is None:
        raise not_found(f"there is nothing at '{path}' for the form to try a model")
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
    call = urllib.request.Request(
        f"{address}/{quote(path)}",
        body if request.method == HTTPMethod.POST else None,
        headers,
        method=request.method,
    )
    return await run_in_threadpool(_answer, call)


def _answer(call: urllib.request.Request) -> Response:
    try:
        with urllib.request.urlopen(call, timeout=ANSWER_S_MAX) as answer:
            return _passed(answer, answer.read(ANSWER_BYTES_MAX))
    except urllib.error.HTTPError as error:
        return _passed(error, error.read(ANSWER_BYTES_MAX))
    except (OSError, http.client.HTTPException) as error:
        raise unavailable(f"the server does not answer: {getattr(error, 'reason', None) or error}") from None


def _passed(answer: http.client.HTTPResponse | urllib.error.HTTPError, body: bytes) -> Response:
    headers = {key: value for key in _RETURNED if (value := answer.headers.get(key))}
    return Response(body, answer.status or 502, headers)


def _too_large() -> Response:
    return Response(
        f'{{"error": "the form sends at most {REQUEST_BYTES_MAX >> 20} MiB"}}', 413, media_type="application/json"
    )
