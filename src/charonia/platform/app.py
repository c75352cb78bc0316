"""The composition root: the platform as one ASGI application."""

import errno
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from urllib.parse import urlencode

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, RedirectResponse, Response
from starlette.exceptions import HTTPException

from charonia import __version__
from charonia.core.errors import Code, RefusalKind, ServingError
from charonia.platform.database.connection import Database
from charonia.platform.environments import catalog as environments_catalog
from charonia.platform.environments import routes as environments
from charonia.platform.openapi import OPENAPI_PATH, describe
from charonia.platform.people import login
from charonia.platform.people import routes as people
from charonia.platform.people.access import NotPermittedError
from charonia.platform.people.headers import HEADERS, SecurityHeaders
from charonia.platform.people.oidc import Provider
from charonia.platform.settings import PlatformSettings
from charonia.platform.state import Platform
from charonia.platform.tasks import routes as tasks
from charonia.platform.tasks.runner import Handler, TaskRunner

_log = logging.getLogger(__name__)

STATUS = {
    Code.NOT_FOUND: 404,
    Code.INVALID_ARG: 400,
    Code.UNAVAILABLE: 503,
    Code.UNSUPPORTED: 501,
    Code.ALREADY_EXISTS: 409,
    Code.CANCELLED: 409,
}
"""HTTP status by code; 500 for others."""

API_PREFIX = "/api/"

_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def make_app(settings: PlatformSettings) -> FastAPI:
    """Return the application; it migrates the database, and begins its work when it starts.

    Raises:
        ServingError: INVALID_ARG for invalid settings; UNAVAILABLE when the database cannot be reached.
    """
    settings.data.mkdir(parents=True, exist_ok=True)
    database = Database(settings.database or f"sqlite:///{settings.data / 'platform.sqlite'}")
    database.migrate()
    runner = TaskRunner(database, settings.data / "tasks", _handlers(settings, database))
    provider = Provider(settings.oidc, settings.url) if settings.oidc.issuer else None
    platform = Platform(settings, database, runner, provider)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        platform.tasks.start()
        yield
        platform.tasks.close()
        database.close()

    app = FastAPI(
        title="Charonia platform",
        version=__version__,
        lifespan=lifespan,
        openapi_url=OPENAPI_PATH,
        docs_url=None,
        redoc_url=None,
    )
    app.state.platform = platform
    for each in (login, people, environments, tasks):
        app.include_router(each.router)
    describe(app)
    app.add_middleware(SecurityHeaders, is_https=settings.is_https)
    for kind, handler in _HANDLERS.items():
        app.add_exception_handler(kind, handler)
    return app


def _handlers(settings: PlatformSettings, database: Database) -> dict[str, Handler]:
    """Return who does a kind of task."""
    return {environments_catalog.KIND: environments_catalog.handler(database, settings.data / "environments")}


def _problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServingError)
    return _answer(STATUS.get(error.code, 500), error.message, error.hint)


def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, NotPermittedError)
    if error.kind is not RefusalKind.UNAUTHENTICATED:
        return _answer(403, error.message)
    if request.method == "GET" and not request.url.path.startswith(API_PREFIX):
        return RedirectResponse(f"{login.LOGIN_PAGE}?{urlencode({'next': request.url.path})}", 303)
    response = _answer(401, error.message)
    response.headers["WWW-Authenticate"] = "Bearer"
    return response


def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    places = [(".".join(map(str, each["loc"])), each["msg"]) for each in error.errors()]
    return _answer(400, "; ".join(f"{place}: {text}" for place, text in places), f"{OPENAPI_PATH} describes the calls")


def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _answer(error.status_code, str(error.detail))


def _os_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, OSError)
    if error.errno in _DISK_FULL:
        return _answer(507, "the disk is full", "make room in the data folder, then try again")
    raise error


def _fault(request: Request, error: Exception) -> Response:
    response = _answer(500, "the platform failed at this call", "its log says why")
    response.headers.update(HEADERS)  # this is outside of the middleware
    return response


def _answer(status: int, message: str, hint: str = "") -> JSONResponse:
    content = {"error": message or HTTPStatus(status).phrase, "hint": hint}
    return JSONResponse({key: text for key, text in content.items() if text}, status)


_HANDLERS = {
    ServingError: _problem,
    NotPermittedError: _refusal,
    RequestValidationError: _invalid,
    HTTPException: _failed,
    OSError: _os_problem,
    Exception: _fault,
}
