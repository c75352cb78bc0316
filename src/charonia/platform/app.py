"""The composition root: the platform as one ASGI application."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI

from charonia.platform.answers import ANSWERS, AnsweringApp
from charonia.platform.artifacts.store import open_artifacts
from charonia.platform.artifacts.uploads import UploadFolder
from charonia.platform.console import routes as console
from charonia.platform.database.connection import Database
from charonia.platform.deployments import routes as deployments
from charonia.platform.deployments.service import Deployments
from charonia.platform.deployments.workloads import Workloads
from charonia.platform.environments import catalog
from charonia.platform.environments import routes as environments
from charonia.platform.isolation.isolation import Isolation
from charonia.platform.jobs import jobs as measurements
from charonia.platform.jobs import routes as jobs
from charonia.platform.models import routes as models
from charonia.platform.models.arrival import VersionTasks, version_handlers
from charonia.platform.models.hosts import AllowedHosts
from charonia.platform.openapi import OPENAPI_PATH, describe
from charonia.platform.people import login
from charonia.platform.people import routes as people
from charonia.platform.people.headers import OwnPages, SecurityHeaders
from charonia.platform.people.oidc import Provider
from charonia.platform.repeats import RepeatedCalls
from charonia.platform.settings import PlatformSettings
from charonia.platform.state import Platform
from charonia.platform.targets.api import DeploymentTarget
from charonia.platform.targets.kserve.opened import open_kserve
from charonia.platform.targets.kubernetes.opened import open_kubernetes
from charonia.platform.targets.local import LocalTarget
from charonia.platform.targets.ray.target import open_ray
from charonia.platform.tasks import routes as tasks
from charonia.platform.tasks.runner import TaskRunner
from charonia.platform.trials.trials import Trials
from charonia.version import __version__

_log = logging.getLogger(__name__)

BODY_BYTES_MAX = 16 * 2**20
"""Largest body of a call. Streamed bodies, such as pieces of an upload, are limited by their routes."""

_ROUTERS = (login, people, models, environments, deployments, jobs, tasks, console)


def make_app(settings: PlatformSettings) -> FastAPI:
    """Return the application; it migrates the database, and starts its work at its own start.

    Raises:
        ServingError: INVALID_ARG for invalid settings; UNAVAILABLE when the database cannot be reached; UNSUPPORTED for
            a cluster without the extra `kubernetes`.
    """
    platform = make_platform(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        platform.tasks.start()
        platform.deployments.start()
        yield
        platform.trials.close()
        platform.deployments.close()
        platform.tasks.close()
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
    for each in _ROUTERS:
        app.include_router(each.router)
    describe(app)
    app.add_middleware(RepeatedCalls, database=platform.database)
    app.add_middleware(OwnPages, settings=settings)
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
    isolation.sweep(local.temporary_folders())
    targets: dict[str, DeploymentTarget] = {local.name: local}
    opens = (open_kubernetes, open_kserve) if settings.kubernetes.config else ()
    clusters = [each(settings.kubernetes, artifacts, data) for each in opens]
    targets |= {each.name: each for each in clusters}
    if settings.ray.dashboard:
        ray = open_ray(settings.ray, artifacts, data)
        targets[ray.name] = ray
    handlers = {
        catalog.KIND: catalog.handler(database, data / "environments", isolation),
        measurements.PERF: measurements.perf_handler(targets, database, isolation),
        measurements.TUNE: measurements.tune_handler(workloads, database, isolation),
        **version_handlers(
            VersionTasks(
                *(database, artifacts, uploads, data / "environments", AllowedHosts(settings.store_hosts), isolation),
                settings.trusted_backends,
            )
        ),
    }
    return Platform(
        settings,
        database,
        TaskRunner(database, data / "tasks", handlers),
        artifacts,
        uploads,
        workloads,
        Deployments(database, targets, workloads),
        Trials(database, workloads, data / "trials", isolation),
        Provider(settings.oidc, settings.url) if settings.oidc.issuer else None,
        clusters,
    )
