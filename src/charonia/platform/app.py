"""The composition root: the platform as one ASGI application, with its error responses and security headers."""

import errno
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, RedirectResponse, Response
from pydantic import ValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from charonia.core.errors import Code, RefusalKind, ServingError, TooLargeError, TooManyError
from charonia.platform.alerts import routes as alerts
from charonia.platform.alerts.alerts import Alerts
from charonia.platform.artifacts.blobs import StorageFullError
from charonia.platform.artifacts.store import open_artifacts
from charonia.platform.artifacts.uploads import UploadFolder
from charonia.platform.console import (
    alert_pages,
    assets,
    deploy_pages,
    deployment_pages,
    environment_pages,
    job_pages,
    model_pages,
    people_page,
    traffic_pages,
    trial_pages,
)
from charonia.platform.console.pages import plain_page, visit_of, wants_page
from charonia.platform.database.connection import Database, DatabaseFullError
from charonia.platform.database.lease import PlatformLease
from charonia.platform.deployments import routes as deployments
from charonia.platform.deployments.service import Deployments
from charonia.platform.deployments.workloads import Workloads
from charonia.platform.environments import catalog
from charonia.platform.environments import routes as environments
from charonia.platform.idempotency import AnsweredBeforeError, IdempotentCalls
from charonia.platform.isolation.isolation import Isolation
from charonia.platform.jobs import jobs
from charonia.platform.models import routes as models
from charonia.platform.models.follow import Polls
from charonia.platform.models.sources import AllowedHosts
from charonia.platform.models.version_import import VersionTasks, version_handlers
from charonia.platform.people import login
from charonia.platform.people import routes as people
from charonia.platform.people.access import NotPermittedError
from charonia.platform.people.oidc import Provider
from charonia.platform.settings import PlatformSettings
from charonia.platform.state import Platform
from charonia.platform.targets.api import DeploymentTarget
from charonia.platform.targets.kserve.objects import open_kserve
from charonia.platform.targets.kubernetes.target import open_kubernetes
from charonia.platform.targets.local import LocalTarget
from charonia.platform.targets.ray.target import open_ray
from charonia.platform.tasks import routes as tasks
from charonia.platform.tasks.runner import TaskRunner
from charonia.platform.trials import Trials
from charonia.platform.values import problems_of
from charonia.version import __version__
from charonia.wire.browsers import foreign_page, host_name, is_local_host, listens_locally

CONTENT_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
        "font-src 'self'",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)

HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}
"""Headers that a route has already set are kept."""

TRANSPORT_POLICY = "max-age=31536000"


class SecurityHeaders:
    """Adds the headers to the responses of an application."""

    def __init__(self, app: ASGIApp, is_https: bool) -> None:
        self._app = app
        self._headers = HEADERS | ({"Strict-Transport-Security": TRANSPORT_POLICY} if is_https else {})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in self._headers.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, with_headers if scope["type"] == "http" else send)


class SameOriginGuard:
    """Refuses changes by pages of other sites, and requests for hosts that are not this platform.

    A session's token and the `SameSite` cookie protect signed-in users; this also covers calls without a session.

    Args:
        settings: Its settings. The host is checked if it listens on the loopback interface.
    """

    def __init__(self, app: ASGIApp, settings: PlatformSettings) -> None:
        self._app = app
        self._origin = settings.url.encode()
        self._host = (urlsplit(settings.url).hostname or "") if listens_locally(settings.host) else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._problem(scope) if scope["type"] == "http" else ""
        if problem:
            hint = f"the platform is at {self._origin.decode()}; --public-url sets another address"
            await JSONResponse({"error": problem, "hint": hint}, 403)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _problem(self, scope: Scope) -> str:
        headers = dict(scope["headers"])
        field = headers.get(b"host", b"").decode("latin-1")
        if self._host is not None and not is_local_host(field) and host_name(field) != self._host:
            return f"requests for the host '{host_name(field)[:256]}' are not allowed"
        page = foreign_page(scope["method"].encode(), headers) if headers.get(b"origin") != self._origin else ""
        return f"requests of web pages of '{page}' are not allowed" if page else ""


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


STATUS = {
    Code.NOT_FOUND: 404,
    Code.INVALID_ARG: 400,
    Code.UNAVAILABLE: 503,
    Code.UNSUPPORTED: 501,
    Code.ALREADY_EXISTS: 409,
    Code.CANCELLED: 409,
}
"""HTTP status by code; 500 for others."""

STATUS_OF_CLASS = {StorageFullError: 507, DatabaseFullError: 507, TooLargeError: 413, TooManyError: 429}
"""HTTP status of errors whose class says more than their code."""

RETRY_AFTER_S = 5
"""`Retry-After` when a client, or the platform, has too much in progress."""

_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def _problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServingError)
    status = STATUS_OF_CLASS.get(type(error)) or STATUS.get(error.code, 500)
    return _answer(request, status, error.message, error.hint)


def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, NotPermittedError)
    if error.kind is not RefusalKind.UNAUTHENTICATED:
        return _answer(request, 403, error.message)
    if wants_page(request):
        return RedirectResponse(f"{login.LOGIN_PAGE}?{urlencode({'next': request.url.path})}", 303)
    response = _answer(request, 401, error.message)
    response.headers["WWW-Authenticate"] = "Bearer"
    return response


def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError | ValidationError)
    return _answer(request, 400, "; ".join(problems_of(error.errors())), f"{OPENAPI_PATH} describes the calls")


def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        return _too_large(request)
    if isinstance(error.__cause__, MemoryError):  # the framework treats any error in a body as a bad request
        return _no_memory(request, error.__cause__)
    message, hint = str(error.detail), ""
    if error.status_code == HTTPStatus.NOT_FOUND and wants_page(request):
        message = f"There is no page at {request.url.path}"
    elif error.status_code == HTTPStatus.NOT_FOUND:
        message, hint = f"there is nothing at {request.url.path}", f"{OPENAPI_PATH} describes the calls"
    response = _answer(request, error.status_code, message, hint)
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        response.headers["Allow"] = ", ".join(_allowed(request))
    return response


def _allowed(request: Request) -> Iterator[str]:
    """Yield the methods of all routes of a path; the framework names only the methods of the first route."""
    for method in ("GET", "PUT", "POST", "PATCH", "DELETE"):
        scope = {**request.scope, "method": method}
        if any(route.matches(scope)[0] is Match.FULL for route in request.app.routes):
            yield method


def _no_memory(request: Request, error: Exception) -> Response:
    return _answer(request, 503, "the platform has no memory left for this call", "try again later", is_busy=True)


def _too_large(request: Request) -> Response:
    return _answer(request, 413, "the body of this call is too large", f"{OPENAPI_PATH} describes uploads in pieces")


class AnsweringApp(FastAPI):
    """An application that answers too large bodies like all other errors; the framework sends plain text."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_replaced = False

        async def sending(message: Message) -> None:
            nonlocal is_replaced
            if message["type"] == "http.response.start" and message["status"] == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
                is_replaced = Headers(raw=message["headers"]).get("content-type", "").startswith("text/plain")
                if is_replaced:
                    response = _too_large(Request(scope, receive))
                    response.headers.update(HEADERS)  # this is outside of the middleware
                    await response(scope, receive, send)
            if not is_replaced:
                await send(message)

        await super().__call__(scope, receive, sending)


def _os_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, OSError)
    if error.errno in _DISK_FULL:
        return _answer(request, 507, "the disk is full", "make room in the data folder, then try again")
    raise error


def _fault(request: Request, error: Exception) -> Response:
    response = _answer(request, 500, "the platform failed at this call", "its log says why")
    response.headers.update(HEADERS)  # this is outside of the middleware
    return response


def _answer(request: Request, status: int, message: str, hint: str = "", *, is_busy: bool = False) -> Response:
    message = message.encode(errors="replace").decode()
    headers = {"Retry-After": str(RETRY_AFTER_S)} if is_busy or status == HTTPStatus.TOO_MANY_REQUESTS else None
    if wants_page(request):
        heading = HTTPStatus(status).phrase
        values = {"heading": heading, "message": message, "hint": hint}
        try:
            visit = visit_of(request) if status < 500 else None
        except NotPermittedError as error:  # a browser that has not signed in
            if status == HTTPStatus.NOT_FOUND:
                return _refusal(request, error)
            visit = None
        if visit is not None:
            return visit.show("problem.html", values, status=status)
        return plain_page("problem.html", values, status)
    content = {"error": message or HTTPStatus(status).phrase, "hint": hint}
    return JSONResponse({key: text for key, text in content.items() if text}, status, headers)


def _repeated(request: Request, error: Exception) -> Response:
    assert isinstance(error, AnsweredBeforeError)
    return error.response()


def _client_disconnected(request: Request, error: Exception) -> Response:
    """Answer a client that closed its connection before its body was complete: it will not read the answer."""
    return Response(status_code=400)


ANSWERS = {
    AnsweredBeforeError: _repeated,
    ClientDisconnect: _client_disconnected,
    ServingError: _problem,
    NotPermittedError: _refusal,
    RequestValidationError: _invalid,
    ValidationError: _invalid,
    HTTPException: _failed,
    OSError: _os_problem,
    MemoryError: _no_memory,
    Exception: _fault,
}
"""The handler of each class of errors."""


_log = logging.getLogger(__name__)

BODY_BYTES_MAX = 16 * 2**20
"""Largest body of a call. Streamed bodies, such as pieces of an upload, are limited by their routes."""

_ROUTERS = (login, people, models, environments, deployments, jobs, tasks, alerts)

PAGES = (
    assets,
    alert_pages,
    people_page,
    environment_pages,
    job_pages,
    model_pages,
    deploy_pages,  # before routes with a name in their address, so that "new" is not taken for one
    deployment_pages,
    traffic_pages,
    trial_pages,
)


def make_app(settings: PlatformSettings) -> FastAPI:
    """Return the application; it migrates the database, and starts its work at its own start."""
    platform = make_platform(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        platform.tasks.start()
        platform.lease.start()
        platform.deployments.start()
        platform.alerts.loop.start()
        platform.polls.loop.start()
        yield
        platform.polls.loop.close()
        platform.alerts.loop.close()
        platform.trials.close()
        platform.deployments.close()
        platform.tasks.close()
        platform.lease.close()
        for cluster in platform.clusters:
            cluster.close()
        platform.database.close()

    app = AnsweringApp(
        title="Charonia platform",
        version=__version__,
        lifespan=lifespan,
        openapi_url=OPENAPI_PATH,
        docs_url=None,
        redoc_url=None,
        max_body_size=BODY_BYTES_MAX,
    )
    app.state.platform = platform
    for router in (*(each.router for each in (*_ROUTERS, *PAGES)), models.hooks):
        app.router.routes.extend(router.routes)  # `include_router` analyses all signatures again, which takes 0.2 s
    describe(app)
    app.add_middleware(IdempotentCalls, database=platform.database)
    app.add_middleware(SameOriginGuard, settings=settings)
    app.add_middleware(SecurityHeaders, is_https=settings.is_https)
    for kind, answer in ANSWERS.items():
        app.add_exception_handler(kind, answer)
    return app


def make_platform(settings: PlatformSettings) -> Platform:
    """Return a platform with a migrated database; nothing is started. Raises as `make_app`."""
    data = settings.data
    data.mkdir(parents=True, exist_ok=True)
    database = Database(settings.database or f"sqlite:///{data / 'platform.sqlite'}")
    database.migrate()
    artifacts, uploads = open_artifacts(settings.artifacts, data), UploadFolder(data / "uploads")
    workloads = Workloads(data, artifacts)
    isolation = Isolation(
        data,
        mode=settings.isolation,
        readable=[Path(path) for path in settings.readable],
        hidden=[artifacts.local.folder],
        reserved=settings.ports,
        refused=settings.refused_ports,
    )
    for remark in isolation.check():
        _log.warning("isolation: %s", remark)
    local = LocalTarget(data / "deployments", settings.ports, isolation)
    targets: dict[str, DeploymentTarget] = {local.name: local}
    opens = (open_kubernetes, open_kserve) if settings.kubernetes.config else ()
    clusters = [each(settings.kubernetes, artifacts, data) for each in opens]
    targets |= {each.name: each for each in clusters}
    if settings.ray.dashboard:
        ray = open_ray(settings.ray, artifacts, data)
        targets[ray.name] = ray
    lease = PlatformLease(database)
    lease.on_taken.append(lambda: isolation.sweep(local.temporary_folders()))
    deployments = Deployments(database, targets, workloads, lease)
    hosts = AllowedHosts(settings.store_hosts)
    versions = VersionTasks(
        database, artifacts, uploads, data / "environments", hosts, isolation,
        workloads.secrets,
        settings.trusted_backends,
        deployments.changes.give,
    )  # fmt: skip
    handlers = {
        catalog.KIND: catalog.handler(database, data / "environments", isolation, deployments.changes.create),
        jobs.PERF: jobs.perf_handler(targets, database, isolation),
        jobs.TUNE: jobs.tune_handler(workloads, database, isolation),
        **version_handlers(versions),
    }
    tasks = TaskRunner(database, data / "tasks", handlers, lease)
    return Platform(
        settings,
        database,
        tasks,
        artifacts,
        uploads,
        workloads,
        deployments,
        Trials(database, workloads, data / "trials", isolation),
        Alerts(
            database, workloads.secrets, hosts, deployments.collector.latest,
            data=data,
            page=settings.url,
            has_turn=lease.is_held,
        ),
        lease,
        Polls(versions, lease.is_held),
        Provider(settings.oidc, settings.url) if settings.oidc.issuer else None,
        clusters,
    )  # fmt: skip
