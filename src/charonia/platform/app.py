"""The composition root: the platform as one ASGI application."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from charonia import __version__
from charonia.core.errors import Code, RefusalKind, ServingError
from charonia.platform.database.connection import Database
from charonia.platform.people.access import NotPermittedError
from charonia.platform.settings import PlatformSettings
from charonia.platform.tasks.runner import TaskRunner

STATUS = {
    Code.NOT_FOUND: 404,
    Code.INVALID_ARG: 400,
    Code.UNAVAILABLE: 503,
    Code.UNSUPPORTED: 501,
    Code.ALREADY_EXISTS: 409,
    Code.CANCELLED: 409,
}
"""HTTP status by code; 500 for others."""


@dataclass(frozen=True, slots=True)
class Platform:
    """What routes work with, at `request.app.state.platform`."""

    settings: PlatformSettings
    database: Database
    tasks: TaskRunner


def make_app(settings: PlatformSettings) -> FastAPI:
    """Return the application; it migrates the database, and begins its work when it starts.

    Raises:
        ServingError: INVALID_ARG for invalid settings; UNAVAILABLE when the database cannot be reached.
    """
    settings.data.mkdir(parents=True, exist_ok=True)
    database = Database(settings.database or f"sqlite:///{settings.data / 'platform.sqlite'}")
    database.migrate()
    platform = Platform(settings, database, TaskRunner(database, settings.data / "tasks", {}))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        platform.tasks.start()
        yield
        platform.tasks.close()
        database.close()

    app = FastAPI(title="Charonia platform", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.platform = platform
    app.add_exception_handler(ServingError, _problem)
    app.add_exception_handler(NotPermittedError, _refusal)
    return app


def _problem(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ServingError)
    content = {"error": error.message, "hint": error.hint}
    return JSONResponse({key: text for key, text in content.items() if text}, STATUS.get(error.code, 500))


def _refusal(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, NotPermittedError)
    status = 401 if error.kind is RefusalKind.UNAUTHENTICATED else 403
    return JSONResponse({"error": error.message}, status)
